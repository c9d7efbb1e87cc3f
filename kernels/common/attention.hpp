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
#include "bump.hpp"
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
  float maximum, weight;  // the maximum as a power of two: scores are exponents of two from `soften` on
};

#if PM_KV_BITS == 16

// Writes the key and value (float32, rotated) of one token and head into the cache.
static inline void write_cache(const Cache& c, int64_t slot, int head, const float* key, const float* value) {
  const int64_t block = slot / c.block_size, at = slot % c.block_size;
  bf16* k = c.key_block(block, head) + at * 2;
  bf16* v = c.value_block(block, head) + (at / 2) * c.head_dim * 2 + (at & 1);
  bf16 rounded[2][MAX_HEAD_DIM];
  for (int d = 0; d < c.head_dim; d += LANES) vstore_bf16(rounded[0] + d, vload(key + d)), vstore_bf16(rounded[1] + d, vload(value + d));
  for (int d = 0; d < c.head_dim; d += 2) std::memcpy(k + int64_t(d) * c.block_size, rounded[0] + d, 2 * sizeof(bf16));
  for (int d = 0; d < c.head_dim; d++) v[d * 2] = rounded[1][d];
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
  store(acc, out, PM_SPAN);
}

// out[rows][tokens rounded up to 16] (row stride PM_SPAN) = q . the first `tokens` keys of a block
static inline void block_scores(int rows, const bf16* q, const Cache& c, const bf16* keys, int tokens, int64_t ahead, float* out) {
  for_attention_tiles(rows, [&](auto mr, int at) {
    int t = 0;
    for (; t + LANES < tokens; t += 32) scores_tile<mr(), 2>(q + at * c.head_dim, c, keys + t * 2, at ? 0 : ahead, out + at * PM_SPAN + t);
    if (t < tokens) scores_tile<mr(), 1>(q + at * c.head_dim, c, keys + t * 2, at ? 0 : ahead, out + at * PM_SPAN + t);
  });
}

struct Span {  // of one head: its blocks in the order they are read, keys, then values
  const Cache& cache;
  const int32_t* blocks;
  int head, count;
  const bf16* keys(int b) const { return cache.key_block(blocks[b], head); }
  const bf16* values(int b) const { return cache.value_block(blocks[b], head); }
  const char* place(int i) const { return (const char*)(i < count ? keys(i) : values(i - count)); }
  // Distance in bytes from one to that PM_KV_PREFETCH further on.
  int64_t ahead(int i) const { return i + PM_KV_PREFETCH < 2 * count ? place(i + PM_KV_PREFETCH) - place(i) : 0; }
};

// out[MR][16 * NV] (row stride head_dim) = p[MR, tokens] (row stride PM_SPAN) . values, dimensions from d on
template <int MR, int NV>
static __attribute__((noinline)) void values_tile(const bf16* p, const Span& s, int tokens, int d, bool fetch, float* out) {
  const int size = s.cache.block_size, head_dim = s.cache.head_dim;
  V acc[MR][NV];
  clear(acc);
  for (int b = 0; b < s.count; b++) {
    const int64_t pairs = (b + 1 < s.count ? size : tokens - b * size) / 2;
    tile<MR, NV, PM_KV_PREFETCH != 0>(p + b * size, PM_SPAN, s.values(b) + d * 2, head_dim * 2, pairs, fetch ? s.ahead(s.count + b) : 0, acc);
  }
  if (tokens & 1) {  // the last pair's second token is not part of the context: its bits must not count, not even times zero
    const bf16* last = s.values(s.count - 1) + (tokens - 1) % size * head_dim + d * 2;
    PM_UNROLL_LOOP(4)
    for (int j = 0; j < NV; j++) {
      const W v = wlow(wload(last + j * 32));
      PM_UNROLL_LOOP(14)
      for (int i = 0; i < MR; i++) acc[i][j] = dot2(acc[i][j], v, wpair(load_pair(p + i * PM_SPAN + tokens - 1)));
    }
  }
  store(acc, out, head_dim);
}

static inline void span_values(int rows, const bf16* p, const Span& s, int tokens, float* out) {
  const int head_dim = s.cache.head_dim;
  for_attention_tiles(rows, [&](auto mr, int at) {
    int d = 0;
    for (; d + 32 <= head_dim; d += 32) values_tile<mr(), 2>(p + at * PM_SPAN, s, tokens, d, at == 0, out + at * head_dim + d);
    if (d < head_dim) values_tile<mr(), 1>(p + at * PM_SPAN, s, tokens, d, at == 0, out + at * head_dim + d);
  });
}

#endif

static inline void vstore_weight(bf16* p, V a) { vstore_bf16(p, a); }
static inline void vstore_weight(float* p, V a) { vstore(p, a); }

// Turns the first `valid` scores of a row into weights: p[0:padded] (zero past `valid`; may be s), their maximum and sum. scale > 0.
template <class P>
static inline Partial soften(float* s, P* p, int valid, int padded, float scale) {
  if (valid <= 0) {
    std::memset(p, 0, sizeof(P) * size_t(padded));
    return {MINUS_INF, 0.f};
  }
  V most = vset(MINUS_INF);
  for (int t = 0; t < padded; t += LANES) {
    V x = vload(s + t);
    if (t + LANES > valid) vstore(s + t, x = vfirst(x, valid > t ? valid - t : 0, MINUS_INF));
    most = vmax(most, x);
  }
  const float maximum = vmaximum(most) * (scale * LOG2E);
  V total = vzero();
  for (int t = 0; t < padded; t += LANES) {
    const V e = vexp2(vfma(vload(s + t), vset(scale * LOG2E), vset(-maximum)));
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
  const int size = c.block_size, padded = int(round_up(most, LANES));
  const Span span = {c, blocks, head, (most + size - 1) / size};
  for (int b = 0; b < span.count; b++)
    block_scores(rows, q, c, span.keys(b), most - b * size < size ? most - b * size : size, span.ahead(b), s + b * size);
  for (int i = 0; i < rows; i++) parts[i] = soften(s + i * PM_SPAN, p + i * PM_SPAN, valid[i], padded, scale);
  span_values(rows, p, span, most, out);
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
  vstore(factors, vexp2(vset(a.maximum - maximum)));
  const float fa = factors[0];
  vstore(factors, vexp2(vset(b.maximum - maximum)));
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
