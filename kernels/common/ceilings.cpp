// What this machine can do at most, whatever the program: bytes read and copied a second, dot products a second.
#include "../common/exports.hpp"
#include "../common/team.hpp"

extern "C" {

// Sums `bytes` at p once, shared out over threads; returns the sum so that nothing is optimised away.
float read_all(const float* p, int64_t bytes, int64_t threads) {
  std::atomic<float> total{0.f};
  parallel(int(threads), [&](int id, int count) {
    const Range r = share(bytes / 256, id, count);
    V sum[4] = {vzero(), vzero(), vzero(), vzero()};
    for (int64_t i = r.begin; i < r.end; i++)
      for (int j = 0; j < 4; j++) sum[j] = vadd(sum[j], vload(p + i * 64 + j * 16));
    const float mine = vsum(vadd(vadd(sum[0], sum[1]), vadd(sum[2], sum[3])));
    float seen = total.load();
    while (!total.compare_exchange_weak(seen, seen + mine)) continue;
  });
  return total.load();
}

void copy_all(float* to, const float* from, int64_t bytes, int64_t threads) {
  parallel(int(threads), [&](int id, int count) {
    const Range r = share(bytes / 64, id, count);
    std::memcpy(to + r.begin * 16, from + r.begin * 16, size_t((r.end - r.begin) * 64));
  });
}

// Each thread: `rounds` times 12 independent dot products (or float32 multiply-adds) of registers.
float dot_rounds(int64_t rounds, int64_t threads, int64_t bf16_products) {
  std::atomic<float> total{0.f};
  parallel(int(threads), [&](int, int) {
    bf16 ones[32];
    for (bf16& x : ones) x = to_bf16(1e-3f);
    W w = wload(ones);
    V a = vset(1e-3f), acc[12];
    for (V& x : acc) x = vzero();
    for (int64_t i = 0; i < rounds; i++) {
      asm volatile("" : : "r"(ones) : "memory");
#pragma GCC unroll 12
      for (int j = 0; j < 12; j++) acc[j] = bf16_products ? dot2(acc[j], w, w) : vfma(a, a, acc[j]);
    }
    V sum = vzero();
    for (const V& x : acc) sum = vadd(sum, x);
    const float mine = vsum(sum);
    float seen = total.load();
    while (!total.compare_exchange_weak(seen, seen + mine)) continue;
  });
  return total.load();
}

}  // extern "C"
