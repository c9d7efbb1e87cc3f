// Grouped-query attention over a paged cache, for one query token (decode) and many (prefill) alike.
//
// The cache is bf16 here and 8-bit integers in kv_int8.hpp (PM_KV_BITS 8). Of one layer, block b at `base + b * block_stride`
// (elements), holding `block_size` tokens:
//   keys   [kv_heads][head_dim / 2][block_size][2]     a vector is 16 tokens of one pair of dimensions
//   values [kv_heads][block_size / 2][head_dim][2]     a vector is 16 dimensions of one pair of tokens
// so that scores and sums are the same tile product as a linear layer's, without horizontal sums.
//
// A context is cut into spans of PM_SPAN keys at absolute positions. Each span gives (maximum, weight, weighted values), and
// spans are merged in order. The spans of one query token may be computed by different threads, those of a prefill tile by
// one: the arithmetic is the same, so chunked and whole prefill, and any batch and thread count, agree to the bit.
// Nothing past a token's own position reaches its result, whatever bits lie there.
#pragma once
#include "team.hpp"
#include "tile.hpp"

#ifndef PM_KV_BITS  // bits a number of the cache: 16 or 8
#define PM_KV_BITS 16
#endif
#ifndef PM_SPAN
#define PM_SPAN 256
#endif
#ifndef PM_ATTENTION_ROWS  // query rows (tokens x heads of a group) in one tile
#define PM_ATTENTION_ROWS 12
#endif
#ifndef PM_KV_PREFETCH  // cache blocks fetched ahead of the one in use: blocks lie apart, where no hardware prefetcher looks
#define PM_KV_PREFETCH 2
#endif
static_assert(PM_KV_BITS == 16 || PM_KV_BITS == 8, "PM_KV_BITS is 16 or 8");
static_assert(PM_SPAN % 64 == 0, "PM_SPAN is a multiple of 64");
static_assert(PM_ATTENTION_ROWS >= 1 && PM_ATTENTION_ROWS <= 14, "PM_ATTENTION_ROWS is 1 to 14");
constexpr int MAX_HEAD_DIM = 256;

class Bump {  // hands out aligned pieces of one allocation; with a null base it only counts
 public:
  explicit Bump(void* base) : base_((char*)base) {}
  template <class T>
  T* take(int64_t count) {
    T* p = (T*)(base_ + used_);
    used_ += round_up(count * int64_t(sizeof(T)), 64);
    return p;
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

#if PM_KV_BITS == 16
using Kv = bf16;
#else
using Kv = int8_t;
#endif

struct Cache {
  Kv* keys;
  Kv* values;
  int64_t block_stride;
  int block_size, kv_heads, head_dim;
  bf16 *key_scales, *value_scales;  // of an integer cache: [kv_heads][block_size], blocks lie block_stride / head_dim apart
  Kv* key_block(int64_t block, int head) const { return keys + block * block_stride + int64_t(head) * block_size * head_dim; }
  Kv* value_block(int64_t block, int head) const { return values + block * block_stride + int64_t(head) * block_size * head_dim; }
};

// One span's contribution to one query row.
struct Partial {
  float maximum, weight;
};

#if PM_KV_BITS == 16

// Writes the key and value (float32, rotated) of one token and head into the cache.
static inline void write_cache(const Cache& c, int64_t slot, int head, const float* key, const float* value) {
  const int64_t block = slot / c.block_size, at = slot % c.block_size;
  bf16* k = c.key_block(block, head) + at * 2;
  bf16* v = c.value_block(block, head) + (at / 2) * c.head_dim * 2 + (at & 1);
  for (int d = 0; d < c.head_dim; d += 2) {
    k[int64_t(d / 2) * c.block_size * 2] = to_bf16(key[d]);
    k[int64_t(d / 2) * c.block_size * 2 + 1] = to_bf16(key[d + 1]);
  }
  for (int d = 0; d < c.head_dim; d++) v[d * 2] = to_bf16(value[d]);
}

// Calls f(integral_constant<tile rows>, first row), the tile sizes being few so that a build stays quick.
template <class F>
static inline void for_attention_tiles(int rows, F&& f) {
  int at = 0;
  for (; at + 12 <= rows; at += 12) f(std::integral_constant<int, 12>{}, at);
  for (; at + 6 <= rows; at += 6) f(std::integral_constant<int, 6>{}, at);
  for (; at + 3 <= rows; at += 3) f(std::integral_constant<int, 3>{}, at);
  for (; at + 1 <= rows; at += 1) f(std::integral_constant<int, 1>{}, at);
}

// out[MR][16 * NV] (row stride PM_SPAN) = q . keys
template <int MR, int NV>
static __attribute__((noinline)) void scores_tile(const bf16* q, const Cache& c, const bf16* keys, int64_t ahead, float* out) {
  V acc[MR][NV];
  clear(acc);
  tile<MR, NV, PM_KV_PREFETCH != 0>(q, c.head_dim, keys, c.block_size * 2, c.head_dim / 2, ahead, acc);
  for (int i = 0; i < MR; i++)
    for (int j = 0; j < NV; j++) vstore(out + i * PM_SPAN + j * 16, acc[i][j]);
}

static inline void block_scores(int rows, const bf16* q, const Cache& c, const bf16* keys, int64_t ahead, float* out) {
  for_attention_tiles(rows, [&](auto mr, int at) {
    int t = 0;
    for (; t + 32 <= c.block_size; t += 32) scores_tile<mr(), 2>(q + at * c.head_dim, c, keys + t * 2, at ? 0 : ahead, out + at * PM_SPAN + t);
    if (t < c.block_size) scores_tile<mr(), 1>(q + at * c.head_dim, c, keys + t * 2, at ? 0 : ahead, out + at * PM_SPAN + t);
  });
}

// sum[MR][16 * NV] (row stride head_dim) += p[MR, tokens] (row stride PM_SPAN) . values
template <int MR, int NV>
static __attribute__((noinline)) void values_tile(const bf16* p, const Cache& c, const bf16* values, int tokens, int64_t ahead, float* sum) {
  V acc[MR][NV];
  PM_UNROLL_LOOP(14)
  for (int i = 0; i < MR; i++)
    PM_UNROLL_LOOP(4)
    for (int j = 0; j < NV; j++) acc[i][j] = vload(sum + i * c.head_dim + j * 16);
  tile<MR, NV, PM_KV_PREFETCH != 0>(p, PM_SPAN, values, c.head_dim * 2, tokens / 2, ahead, acc);
  if (tokens & 1) {  // the last pair's second token is not part of the context: its bits must not count, not even times zero
    const int64_t q = tokens / 2;
    PM_UNROLL_LOOP(4)
    for (int j = 0; j < NV; j++) {
      const W v = wlow(wload(values + q * c.head_dim * 2 + j * 32));
      PM_UNROLL_LOOP(14)
      for (int i = 0; i < MR; i++) acc[i][j] = dot2(acc[i][j], v, wpair(load_pair(p + i * PM_SPAN + 2 * q)));
    }
  }
  PM_UNROLL_LOOP(14)
  for (int i = 0; i < MR; i++)
    PM_UNROLL_LOOP(4)
    for (int j = 0; j < NV; j++) vstore(sum + i * c.head_dim + j * 16, acc[i][j]);
}

static inline void block_values(int rows, const bf16* p, const Cache& c, const bf16* values, int tokens, int64_t ahead, float* sum) {
  for_attention_tiles(rows, [&](auto mr, int at) {
    int d = 0;
    for (; d + 32 <= c.head_dim; d += 32) values_tile<mr(), 2>(p + at * PM_SPAN, c, values + d * 2, tokens, at ? 0 : ahead, sum + at * c.head_dim + d);
    if (d < c.head_dim) values_tile<mr(), 1>(p + at * PM_SPAN, c, values + d * 2, tokens, at ? 0 : ahead, sum + at * c.head_dim + d);
  });
}

#endif

static inline void vstore_weight(bf16* p, V a) { vstore_bf16(p, a); }
static inline void vstore_weight(float* p, V a) { vstore(p, a); }

// Turns the first `valid` scores of a row into weights: p[0:padded] (zero past `valid`; may be s), their maximum and sum.
template <class P>
static inline Partial soften(float* s, P* p, int valid, int padded, float scale) {
  if (valid <= 0) {
    std::memset(p, 0, sizeof(P) * size_t(padded));
    return {MINUS_INF, 0.f};
  }
  V most = vset(MINUS_INF);
  for (int t = 0; t < padded; t += LANES) {
    V x = vmul(vload(s + t), vset(scale));
    if (t + LANES > valid) x = vfirst(x, valid > t ? valid - t : 0, MINUS_INF);
    vstore(s + t, x);
    most = vmax(most, x);
  }
  const float maximum = vmaximum(most);
  V total = vzero();
  for (int t = 0; t < padded; t += LANES) {
    const V e = vexp(vsub(vload(s + t), vset(maximum)));
    vstore_weight(p + t, e);
    total = vadd(total, e);
  }
  return {maximum, vsum(total)};
}

#if PM_KV_BITS == 8
#include "kv_int8.hpp"
#else

// One span for a tile of query rows of one group. Row i sees `valid[i]` of the span's keys. out[rows][head_dim], parts[rows].
static void attend_span(int rows, const bf16* q, const Cache& c, const int32_t* blocks, int head, const int* valid, float scale, float* out, Partial* parts) {
  alignas(64) float s[PM_ATTENTION_ROWS * PM_SPAN];
  alignas(64) bf16 p[PM_ATTENTION_ROWS * PM_SPAN];
  int most = 0;
  for (int i = 0; i < rows; i++) most = valid[i] > most ? valid[i] : most;
  const int count = (most + c.block_size - 1) / c.block_size, padded = count * c.block_size;
  // The blocks in the order they are read: keys, then values. Distance in bytes from one to that PM_KV_PREFETCH further on.
  const auto place = [&](int i) { return (const char*)(i < count ? c.key_block(blocks[i], head) : c.value_block(blocks[i - count], head)); };
  const auto ahead = [&](int i) { return i + PM_KV_PREFETCH < 2 * count ? place(i + PM_KV_PREFETCH) - place(i) : 0; };
  for (int b = 0; b < count; b++)
    block_scores(rows, q, c, c.key_block(blocks[b], head), ahead(b), s + b * c.block_size);
  for (int i = 0; i < rows; i++) parts[i] = soften(s + i * PM_SPAN, p + i * PM_SPAN, valid[i], padded, scale);
  std::memset(out, 0, sizeof(float) * size_t(rows * c.head_dim));
  for (int b = 0; b < count; b++) {
    const int left = most - b * c.block_size;
    block_values(rows, p + b * c.block_size, c, c.value_block(blocks[b], head), left < c.block_size ? left : c.block_size, ahead(count + b), out);
  }
}

#endif

// Merges span (b, values) into the running (a, sum).
static inline void merge(Partial& a, float* sum, const Partial& b, const float* values, int head_dim) {
  if (b.weight == 0.f) return;
  if (a.weight == 0.f) {
    a = b;
    std::memcpy(sum, values, sizeof(float) * size_t(head_dim));
    return;
  }
  const float maximum = a.maximum > b.maximum ? a.maximum : b.maximum;
  float factors[LANES];
  vstore(factors, vexp(vset(a.maximum - maximum)));
  const float fa = factors[0];
  vstore(factors, vexp(vset(b.maximum - maximum)));
  const float fb = factors[0];
  for (int d = 0; d < head_dim; d += LANES)
    vstore(sum + d, vfma(vload(values + d), vset(fb), vmul(vload(sum + d), vset(fa))));
  a = {maximum, a.weight * fa + b.weight * fb};
}

static inline void finish(bf16* out, const Partial& a, const float* sum, int head_dim) {
  const V inverse = vset(1.f / a.weight);
  for (int d = 0; d < head_dim; d += LANES) vstore_bf16(out + d, vmul(vload(sum + d), inverse));
}

// Attention of one layer over a step's sequences, cut into units that any thread may take in any order.
// A sequence whose query rows fit one tile has a unit for each (head of keys, span); the unit that finishes last merges them.
// A longer one has a unit for each (head of keys, tile of query rows), which goes through the spans itself.
struct Attention {
  Cache cache;
  int sequences, group;  // group: query heads that share a head of keys
  int64_t rows, table_width, out_stride;
  const int32_t *query_start, *context_len, *block_table;
  const bf16* q;  // [kv_heads][rows][group][head_dim]
  bf16* out;      // [rows][out_stride], head h at column h * head_dim
  float scale;
  int64_t* unit_start;     // [sequences + 1]
  float* partials;         // [units][PM_ATTENTION_ROWS][head_dim + 2]
  std::atomic<int>* done;  // [sequences][kv_heads], zero between layers

  int64_t query_rows(int s) const { return int64_t(query_start[s + 1] - query_start[s]) * group; }
  int64_t spans(int s) const { return (context_len[s] + PM_SPAN - 1) / PM_SPAN; }
  bool split(int s) const { return query_rows(s) <= PM_ATTENTION_ROWS; }
  int64_t units_a_head(int s) const { return split(s) ? spans(s) : (query_rows(s) + PM_ATTENTION_ROWS - 1) / PM_ATTENTION_ROWS; }
  int64_t partial_floats() const { return int64_t(PM_ATTENTION_ROWS) * (cache.head_dim + 2); }

  void plan() {
    unit_start[0] = 0;
    for (int s = 0; s < sequences; s++) unit_start[s + 1] = unit_start[s] + units_a_head(s) * cache.kv_heads;
  }
  int64_t units() const { return unit_start[sequences]; }

  void run(int64_t unit) const {
    int s = 0;
    while (unit_start[s + 1] <= unit) s++;
    const int64_t each = units_a_head(s), local = unit - unit_start[s];
    const int head = int(local / each);
    if (split(s)) {
      run_span(int(query_rows(s)), s, head, local % each, unit);
    } else {  // the last tiles see the most keys: they are taken first
      const int64_t t = each - 1 - local % each, begin = query_rows(s) * t / each, end = query_rows(s) * (t + 1) / each;
      run_tile(int(end - begin), s, head, begin);
    }
  }

 private:
  const int32_t* span_blocks(int s, int64_t span) const { return block_table + s * table_width + span * (PM_SPAN / cache.block_size); }
  // Keys that query row r (of sequence s, counted from its first) sees of a span.
  int valid(int s, int64_t r, int64_t span) const {
    const int64_t first = context_len[s] - (query_start[s + 1] - query_start[s]);
    const int64_t keys = first + r / group + 1 - span * PM_SPAN;
    return int(keys < 0 ? 0 : keys > PM_SPAN ? PM_SPAN : keys);
  }
  const bf16* query(int s, int head, int64_t r) const {
    return q + ((int64_t(head) * rows + query_start[s]) * group + r) * cache.head_dim;
  }
  void write(int s, int head, int64_t r, const Partial& part, const float* sum) const {
    const int64_t row = query_start[s] + r / group, column = (int64_t(head) * group + r % group) * cache.head_dim;
    finish(out + row * out_stride + column, part, sum, cache.head_dim);
  }

  void run_span(int count, int s, int head, int64_t span, int64_t unit) const {
    const int hd = cache.head_dim;
    float* values = partials + unit * partial_floats();
    Partial* parts = (Partial*)(values + PM_ATTENTION_ROWS * hd);
    int seen[PM_ATTENTION_ROWS];
    for (int i = 0; i < count; i++) seen[i] = valid(s, i, span);
    attend_span(count, query(s, head, 0), cache, span_blocks(s, span), head, seen, scale, values, parts);
    std::atomic<int>& finished = done[s * cache.kv_heads + head];
    const int64_t each = spans(s);
    if (finished.fetch_add(1, std::memory_order_acq_rel) + 1 < each) return;
    finished.store(0, std::memory_order_relaxed);
    values -= span * partial_floats();
    parts = (Partial*)(values + PM_ATTENTION_ROWS * hd);
    for (int i = 0; i < count; i++) {
      for (int64_t k = 1; k < each; k++) {
        const float* next = values + k * partial_floats();
        merge(parts[i], values + i * hd, ((const Partial*)(next + PM_ATTENTION_ROWS * hd))[i], next + i * hd, hd);
      }
      write(s, head, i, parts[i], values + i * hd);
    }
  }

  void run_tile(int count, int s, int head, int64_t first) const {
    const int hd = cache.head_dim;
    alignas(64) float sum[PM_ATTENTION_ROWS * MAX_HEAD_DIM], next[PM_ATTENTION_ROWS * MAX_HEAD_DIM];
    Partial total[PM_ATTENTION_ROWS], part[PM_ATTENTION_ROWS];
    for (int64_t span = 0; valid(s, first + count - 1, span) > 0 && span < spans(s); span++) {
      int seen[PM_ATTENTION_ROWS];
      for (int i = 0; i < count; i++) seen[i] = valid(s, first + i, span);
      attend_span(count, query(s, head, first), cache, span_blocks(s, span), head, seen, scale, span ? next : sum, span ? part : total);
      for (int i = 0; span && i < count; i++) merge(total[i], sum + i * hd, part[i], next + i * hd, hd);
    }
    for (int i = 0; i < count; i++) write(s, head, first + i, total[i], sum + i * hd);
  }
};

// How many units a step can have at most, for sizing scratch memory before `plan`.
static inline int64_t most_units(const Attention& a) {
  int64_t n = 0;
  for (int s = 0; s < a.sequences; s++) n += a.units_a_head(s) * a.cache.kv_heads;
  return n;
}
