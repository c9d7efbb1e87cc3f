// The cache as 8-bit integers, half the bytes of bf16. Each token's key and value of a head have a bf16 scale, kept in pools of their
// own whose dimension 0 is the block too, so that a block that is copied or evicted takes its scales along.
//   keys   [kv_heads][head_dim / 4][block_size][4]     a vector is 16 tokens of four dimensions
//   values [kv_heads][block_size / 4][head_dim][4]     a vector is 16 dimensions of four tokens
//   scales [kv_heads][block_size], of keys and of values: number ~ scale * level, levels -127..127
// Queries, and weights times the values' scales, are taken as 14 bits and a sign in two bytes each: four products an instruction,
// sums exact, and what is lost is the cache's own rounding alone.

// The largest magnitude of x[0:n], n a multiple of 16; NaN when one of them is NaN or infinite.
static inline float largest_of(const float* x, int n) {
  V most = vzero(), bad = vzero();
  for (int i = 0; i < n; i += LANES) {
    most = vmax(most, vmax(vload(x + i), vsub(vzero(), vload(x + i))));
    bad = vfma(vload(x + i), vzero(), bad);
  }
  return vmaximum(most) + vsum(bad);
}

struct Split {  // one row: x[i] ~ scale * (128 * high byte + low byte), low bytes 0..127
  float scale;
  int32_t high, low;  // sums of the bytes
};

// The high bytes of x[0:n] go to bytes[0:n], the low ones `half` further on.
static inline Split split(const float* x, int n, int8_t* bytes, int half) {
  const float largest = largest_of(x, n), inverse = largest > 0.f ? 16383.f / largest : 0.f;
  V highs = vzero(), lows = vzero();
  for (int i = 0; i < n; i += LANES) {
    const V u = vround(vmul(vload(x + i), vset(inverse)));
    const V high = vround(vmul(vsub(u, vset(63.5f)), vset(1.f / 128)));  // rounded down
    const V low = vsub(u, vmul(high, vset(128.f)));
    vstore_int8(bytes + i, high), vstore_int8(bytes + half + i, low);
    highs = vadd(highs, high), lows = vadd(lows, low);  // whole numbers below 2^24: exact
  }
  return {largest / 16383.f, int32_t(vsum(highs)), int32_t(vsum(lows))};
}

// x[0:n] as levels of the scale that is returned, rounded so that the largest is not cut off.
static inline bf16 quantise_head(const float* x, int n, int8_t* levels) {
  const float largest = largest_of(x, n);
  bf16 scale = to_bf16(largest / 127.f);
  if (to_float(scale) * 127.f < largest) scale++;
  const V divisor = vset(scale ? to_float(scale) : 1.f);
  for (int i = 0; i < n; i += LANES) vstore_int8(levels + i, vround(vdiv(vload(x + i), divisor)));
  return scale;
}

// Writes the key and value (float32, rotated) of one token and head into the cache.
static inline void write_cache(const Cache& c, int64_t slot, int head, const float* key, const float* value) {
  const int64_t block = slot / c.block_size, at = slot % c.block_size;
  const int64_t scale_at = block * (c.block_stride / c.head_dim) + int64_t(head) * c.block_size + at;
  int8_t levels[MAX_HEAD_DIM];
  int8_t* k = c.key_block(block, head) + at * 4;
  int8_t* v = c.value_block(block, head) + at / 4 * c.head_dim * 4 + at % 4;
  c.key_scales[scale_at] = quantise_head(key, c.head_dim, levels);
  for (int d = 0; d < c.head_dim; d += 4) std::memcpy(k + int64_t(d) * c.block_size, levels + d, 4);
  c.value_scales[scale_at] = quantise_head(value, c.head_dim, levels);
  for (int d = 0; d < c.head_dim; d++) v[d * 4] = levels[d];
}

// high[i][j] and low[i][j] += x[i] (rows of `split`, 2 * half apart) . w, the cache's vectors of quad q being NV at w + q * stride. SIGNED: x has both signs, and the products are those of 128 more than each level.
template <int MR, int NV, bool SIGNED>
static inline __attribute__((always_inline)) void split_tile(const int8_t* x, int64_t half, const int8_t* w, int64_t stride, int quads, int64_t ahead,
                                                             I (&high)[MR][NV], I (&low)[MR][NV]) {
  const auto quad = [](const int8_t* p) __attribute__((always_inline)) {
    uint32_t four;
    std::memcpy(&four, p, 4);
    return bquad(four);
  };
  for (int q = 0; q < quads; q++) {
    I b[NV];
    PM_UNROLL_LOOP(2)
    for (int j = 0; j < NV; j++) {
      b[j] = bload((const uint8_t*)(w + q * stride + j * 64));
      if (PM_KV_PREFETCH) prefetch((const char*)(w + q * stride + j * 64) + ahead);
      if (SIGNED) b[j] = from_minus_128(b[j]);
    }
    PM_UNROLL_LOOP(6)
    for (int i = 0; i < MR; i++) {
      const I h = quad(x + 2 * i * half + 4 * q), l = quad(x + (2 * i + 1) * half + 4 * q);
      PM_UNROLL_LOOP(2)
      for (int j = 0; j < NV; j++) {
        high[i][j] = SIGNED ? dot4(high[i][j], b[j], h) : dot4(high[i][j], h, b[j]);
        low[i][j] = SIGNED ? dot4(low[i][j], b[j], l) : dot4(low[i][j], l, b[j]);
      }
    }
  }
}

static inline V joined(I high, I low) { return vfma(ifloat(high), vset(128.f), ifloat(low)); }

// out[MR][16 * NV] (row stride PM_SPAN) = q . keys
template <int MR, int NV>
static __attribute__((noinline)) void scores_tile(const int8_t* q, const Split* rows, const Cache& c, const int8_t* keys, const bf16* scales, int64_t ahead, float* out) {
  I high[MR][NV], low[MR][NV];
  for (int i = 0; i < MR; i++)
    for (int j = 0; j < NV; j++) high[i][j] = iset(-128 * rows[i].high), low[i][j] = iset(-128 * rows[i].low);
  split_tile<MR, NV, true>(q, c.head_dim, keys, c.block_size * 4, c.head_dim / 4, ahead, high, low);
  for (int i = 0; i < MR; i++)
    for (int j = 0; j < NV; j++)
      vstore(out + i * PM_SPAN + j * 16, vmul(vmul(joined(high[i][j], low[i][j]), vset(rows[i].scale)), vload_bf16(scales + j * 16)));
}

// sum[MR][16 * NV] (row stride head_dim) += p . values, in units of p's scale
template <int MR, int NV>
static __attribute__((noinline)) void values_tile(const int8_t* p, const Cache& c, const int8_t* values, int tokens, int64_t ahead, float* sum) {
  I high[MR][NV], low[MR][NV];
  for (int i = 0; i < MR; i++)
    for (int j = 0; j < NV; j++) high[i][j] = low[i][j] = iset(0);
  split_tile<MR, NV, false>(p, PM_SPAN, values, c.head_dim * 4, (tokens + 3) / 4, ahead, high, low);
  for (int i = 0; i < MR; i++)
    for (int j = 0; j < NV; j++) {
      float* to = sum + i * c.head_dim + j * 16;
      vstore(to, vadd(vload(to), joined(high[i][j], low[i][j])));
    }
}

// Calls f(integral_constant<rows>, integral_constant<vectors>, first row, first number) for tiles of rows x width (a multiple of 16).
template <class F>
static inline void for_split_tiles(int rows, int width, F&& f) {
  const auto across = [&](auto mr, int row) {
    int at = 0;
    for (; at + 32 <= width; at += 32) f(mr, std::integral_constant<int, 2>{}, row, at);
    if (at < width) f(mr, std::integral_constant<int, 1>{}, row, at);
  };
  int row = 0;
  for (; row + 6 <= rows; row += 6) across(std::integral_constant<int, 6>{}, row);
  for (; row + 3 <= rows; row += 3) across(std::integral_constant<int, 3>{}, row);
  for (; row < rows; row++) across(std::integral_constant<int, 1>{}, row);
}

// Weights p[0:n], times their values' scales, as bytes. What lies in the scales of weightless tokens does not count.
static inline Split split_weights(float* p, const float* scales, int n, int8_t* bytes) {
  for (int t = 0; t < n; t += LANES) {
    const V weight = vload(p + t);
    vstore(p + t, vzero_below(vmul(weight, vload(scales + t)), weight, std::numeric_limits<float>::min()));
  }
  return split(p, n, bytes, PM_SPAN);
}

// One span for a tile of query rows of one group. Row i sees `valid[i]` of the span's keys. out[rows][head_dim], parts[rows].
static void attend_span(int rows, const bf16* q, const Cache& c, const int32_t* blocks, int head, const int* valid, float scale, float* out, Partial* parts) {
  alignas(64) float s[PM_ATTENTION_ROWS * PM_SPAN], x[MAX_HEAD_DIM], value_scales[PM_SPAN];
  alignas(64) int8_t q8[PM_ATTENTION_ROWS * 2 * MAX_HEAD_DIM], p8[PM_ATTENTION_ROWS * 2 * PM_SPAN];
  Split queries[PM_ATTENTION_ROWS];
  int most = 0;
  for (int i = 0; i < rows; i++) {
    most = valid[i] > most ? valid[i] : most;
    for (int d = 0; d < c.head_dim; d += LANES) vstore(x + d, vload_bf16(q + i * c.head_dim + d));
    queries[i] = split(x, c.head_dim, q8 + i * 2 * c.head_dim, c.head_dim);
  }
  const int size = c.block_size, count = (most + size - 1) / size, padded = count * size;
  const int64_t stride = c.block_stride / c.head_dim;
  const auto scales = [&](const bf16* of, int b) { return of + blocks[b] * stride + int64_t(head) * size; };
  // The blocks in the order they are read: keys, then values. Distance in bytes from one to that PM_KV_PREFETCH further on.
  const auto place = [&](int i) { return (const char*)(i < count ? c.key_block(blocks[i], head) : c.value_block(blocks[i - count], head)); };
  const auto ahead = [&](int i) { return i + PM_KV_PREFETCH < 2 * count ? place(i + PM_KV_PREFETCH) - place(i) : 0; };
  for (int b = 0; b < count; b++)
    for_split_tiles(rows, size, [&](auto mr, auto nv, int row, int t) {
      scores_tile<mr(), nv()>(q8 + row * 2 * c.head_dim, queries + row, c, c.key_block(blocks[b], head) + t * 4, scales(c.key_scales, b) + t,
                              row ? 0 : ahead(b), s + row * PM_SPAN + b * size + t);
    });
  for (int b = 0; b < count; b++)
    for (int t = 0; t < size; t += LANES) vstore(value_scales + b * size + t, vload_bf16(scales(c.value_scales, b) + t));
  Split weights[PM_ATTENTION_ROWS];
  for (int i = 0; i < rows; i++) {
    parts[i] = soften(s + i * PM_SPAN, s + i * PM_SPAN, valid[i], padded, scale);
    weights[i] = split_weights(s + i * PM_SPAN, value_scales, padded, p8 + i * 2 * PM_SPAN);
  }
  std::memset(out, 0, sizeof(float) * size_t(rows * c.head_dim));
  for (int b = 0; b < count; b++) {
    const int left = most - b * size, tokens = left < size ? left : size;
    for_split_tiles(rows, c.head_dim, [&](auto mr, auto nv, int row, int d) {
      values_tile<mr(), nv()>(p8 + row * 2 * PM_SPAN + b * size, c, c.value_block(blocks[b], head) + d * 4, tokens, row ? 0 : ahead(count + b),
                              out + row * c.head_dim + d);
    });
  }
  for (int i = 0; i < rows; i++)
    for (int d = 0; d < c.head_dim; d += LANES) vstore(out + i * c.head_dim + d, vmul(vload(out + i * c.head_dim + d), vset(weights[i].scale)));
}
