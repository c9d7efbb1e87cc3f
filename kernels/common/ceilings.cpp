// What this machine can do at most, whatever the program: bytes read and copied a second, products a second, what it costs to
// start threads and to have them meet. Sums are returned so that nothing is optimised away.
#include "../common/exports.hpp"
#include "../common/team.hpp"

// The sum over threads of f(id, threads).
template <class F>
static float sum_over(int64_t threads, F&& f) {
  std::atomic<float> total{0.f};
  parallel(int(threads), [&](int id, int count) {
    const float mine = f(id, count);
    float seen = total.load();
    while (!total.compare_exchange_weak(seen, seen + mine)) continue;
  });
  return total.load();
}

// The sum of `add(sum, c)` over c = 0, step, ... below k, in four independent sums; k is a multiple of 4 * step.
template <class Sum, class Add>
static inline void four_sums(Sum* sum, int64_t k, int64_t step, Add&& add) {
  for (int64_t c = 0; c < k; c += 4 * step)
    for (int j = 0; j < 4; j++) sum[j] = add(sum[j], c + j * step);
}

static inline float dot_f32(const float* w, const float* x, int64_t k) {
  V sum[4] = {vzero(), vzero(), vzero(), vzero()};
  four_sums(sum, k, 16, [&](V s, int64_t c) { return vfma(vload(w + c), vload(x + c), s); });
  return vsum(vadd(vadd(sum[0], sum[1]), vadd(sum[2], sum[3])));
}

static inline float dot_bf16(const bf16* w, const bf16* x, int64_t k) {
  V sum[4] = {vzero(), vzero(), vzero(), vzero()};
  four_sums(sum, k, 32, [&](V s, int64_t c) { return dot2(s, wload(w + c), wload(x + c)); });
  return vsum(vadd(vadd(sum[0], sum[1]), vadd(sum[2], sum[3])));
}

static inline float dot_int8(const uint8_t* w, const uint8_t* x, int64_t k) {
  I sum[4] = {iset(0), iset(0), iset(0), iset(0)};
  four_sums(sum, k, 64, [&](I s, int64_t c) { return dot4(s, bload(w + c), bload(x + c)); });
  return vsum(vadd(vadd(ifloat(sum[0]), ifloat(sum[1])), vadd(ifloat(sum[2]), ifloat(sum[3]))));
}

enum Kind { FLOAT32, BF16, INT8 };

extern "C" {

// Sums `bytes` at p once, shared out over threads.
float read_all(const float* p, int64_t bytes, int64_t threads) {
  return sum_over(threads, [&](int id, int count) {
    const Range r = share(bytes / 256, id, count);
    V sum[4] = {vzero(), vzero(), vzero(), vzero()};
    for (int64_t i = r.begin; i < r.end; i++)
      for (int j = 0; j < 4; j++) sum[j] = vadd(sum[j], vload(p + i * 64 + j * 16));
    return vsum(vadd(vadd(sum[0], sum[1]), vadd(sum[2], sum[3])));
  });
}

void copy_all(float* to, const float* from, int64_t bytes, int64_t threads) {
  parallel(int(threads), [&](int id, int count) {
    const Range r = share(bytes / 64, id, count);
    std::memcpy(to + r.begin * 16, from + r.begin * 16, size_t((r.end - r.begin) * 64));
  });
}

// The sum of w[n, k] . x[k], rows shared out over threads; k is a multiple of 256, elements are of `kind`.
float gemv(const void* w, const void* x, int64_t n, int64_t k, int64_t kind, int64_t threads) {
  return sum_over(threads, [&](int id, int count) {
    const Range r = share(n, id, count);
    float sum = 0.f;
    for (int64_t i = r.begin; i < r.end; i++)
      sum += kind == FLOAT32 ? dot_f32((const float*)w + i * k, (const float*)x, k)
             : kind == BF16  ? dot_bf16((const bf16*)w + i * k, (const bf16*)x, k)
                             : dot_int8((const uint8_t*)w + i * k, (const uint8_t*)x, k);
    return sum;
  });
}

// Each thread: `rounds` times 12 independent bf16 dot products (or float32 multiply-adds) of registers.
float dot_rounds(int64_t rounds, int64_t threads, int64_t kind) {
  return sum_over(threads, [&](int, int) {
    bf16 ones[32];
    for (bf16& x : ones) x = to_bf16(1e-3f);
    W w = wload(ones);
    V a = vset(1e-3f), acc[12];
    for (V& x : acc) x = vzero();
    for (int64_t i = 0; i < rounds; i++) {
      asm volatile("" : : "r"(ones) : "memory");
#pragma GCC unroll 12
      for (int j = 0; j < 12; j++) acc[j] = kind == BF16 ? dot2(acc[j], w, w) : vfma(a, a, acc[j]);
    }
    V sum = vzero();
    for (const V& x : acc) sum = vadd(sum, x);
    return vsum(sum);
  });
}

// The same with bytes, four products a lane.
float byte_rounds(int64_t rounds, int64_t threads) {
  return sum_over(threads, [&](int, int) {
    uint8_t ones[64];
    for (uint8_t& x : ones) x = 1;
    I acc[12];
    for (I& x : acc) x = iset(0);
    for (int64_t i = 0; i < rounds; i++) {
      asm volatile("" : : "r"(ones) : "memory");
      const I w = bload(ones);  // read again, or a compiler may multiply by `rounds`
#pragma GCC unroll 12
      for (int j = 0; j < 12; j++) acc[j] = dot4(acc[j], w, w);
    }
    V sum = vzero();
    for (const I& x : acc) sum = vadd(sum, ifloat(x));
    return vsum(sum);
  });
}

// All threads meet `rounds` times.
void meet(int64_t rounds, int64_t threads) {
  Barrier barrier;
  parallel(int(threads), [&](int, int count) {
    for (int64_t i = 0; i < rounds; i++) barrier.wait(count);
  });
}

// Threads start and end `rounds` times with nothing to do.
void start_threads(int64_t rounds, int64_t threads) {
  for (int64_t i = 0; i < rounds; i++) parallel(int(threads), [](int, int) { asm volatile("" : : : "memory"); });
}

}  // extern "C"
