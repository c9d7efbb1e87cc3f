// Weights as integers of PM_WEIGHT_BITS (8 or 4), inputs quantised to 8 bits as they come: four products an instruction, and half
// or a quarter of the bytes that bf16 reads.
//   w[c, k] ~ 8 bits: scale[c, g] * (u - 128), for each group g of k.  4 bits: scale[c, g] * u + low[c, g].
//   x[r, k] ~ scale[r, g] * s, s in -127..127, one scale for each group of PM_GROUP along k.
// A panel is, group by group, [PM_GROUP / 4][PANEL][4] unsigned bytes (4 bits: two such vectors in one, the earlier in the low
// halves), followed by bf16 scale[PANEL] and, at 4 bits, low[PANEL]. k is padded to whole groups with values that count as zero.
#pragma once
#include "tile.hpp"

#ifndef PM_GROUP  // elements of k that share a scale, of inputs and of weights
#define PM_GROUP 32
#endif
static_assert(PM_WEIGHT_BITS == 8 || PM_WEIGHT_BITS == 4, "PM_WEIGHT_BITS is 16, 8 or 4");
static_assert(PM_GROUP % 16 == 0, "PM_GROUP is a multiple of 16");
#if defined(PM_LAYOUT) && PM_LAYOUT == 0
#error "integer weights are always repacked: PM_LAYOUT 0 is for bf16"
#endif
#ifndef PM_LAYOUT
#define PM_LAYOUT 1
#endif

constexpr int ROW_TILE = PM_ROW_TILE;  // most rows in a product
using Weight = uint8_t;
using Input = int8_t;

// An encoded row: int8 [groups][PM_GROUP], then float scale[groups], then int32 sum[groups] of the bytes.
static inline int64_t groups_of(int64_t k) { return (k + PM_GROUP - 1) / PM_GROUP; }
static inline int64_t input_stride(int64_t k) { return round_up(groups_of(k) * (PM_GROUP + 8), 64); }
static inline int64_t padded_k(int64_t k) { return round_up(k, PM_GROUP); }  // of the bf16 rows that are encoded
constexpr int64_t VECTOR_BYTES = PANEL * PM_GROUP * PM_WEIGHT_BITS / 8;  // of a group, without its scales
constexpr int64_t GROUP_BYTES = round_up(VECTOR_BYTES + PANEL * (PM_WEIGHT_BITS == 4 ? 4 : 2), 64);
static inline int64_t panel_elements(int64_t k) { return groups_of(k) * GROUP_BYTES; }
static inline int64_t packed_bytes(const bf16*, int64_t n, int64_t k, int64_t) { return round_up(n, PANEL) / PANEL * panel_elements(k); }

// Quantises x[0:k] (bf16; what lies past k does not count) to one encoded row.
static void encode(const bf16* x, int64_t k, Input* out) {
  const int64_t groups = groups_of(k);
  float* scales = (float*)(out + groups * PM_GROUP);
  int32_t* sums = (int32_t*)(scales + groups);
  for (int64_t g = 0; g < groups; g++) {
    const int64_t left = k - g * PM_GROUP;
    bf16 padded[PM_GROUP] = {};
    const bf16* from = x + g * PM_GROUP;
    if (left < PM_GROUP) std::memcpy(padded, from, sizeof(bf16) * size_t(left)), from = padded;
    V most = vzero(), sum = vzero();
    for (int i = 0; i < PM_GROUP; i += LANES) most = vmax(most, vmax(vload_bf16(from + i), vsub(vzero(), vload_bf16(from + i))));
    const float largest = vmaximum(most), inverse = largest > 0.f ? 127.f / largest : 0.f;
    for (int i = 0; i < PM_GROUP; i += LANES) {
      const V s = vround(vmul(vload_bf16(from + i), vset(inverse)));
      vstore_int8(out + g * PM_GROUP + i, s);
      sum = vadd(sum, s);  // whole numbers below 2^24: exact
    }
    scales[g] = largest / 127.f, sums[g] = int32_t(vsum(sum));
  }
}

// One output's weights of one group as unsigned integers; returns what turns them back: w ~ scale * u + low.
struct Affine {
  float scale, low;
};
static Affine quantise(const bf16* w, int64_t count, uint8_t* out) {
  float least = 0.f, most = 0.f;
  for (int64_t i = 0; i < count; i++) {
    const float v = to_float(w[i]);
    least = i == 0 || v < least ? v : least, most = i == 0 || v > most ? v : most;
  }
  Affine a = {to_float(to_bf16((most - least) / 15.f)), to_float(to_bf16(least))};
  if (PM_WEIGHT_BITS == 8) {
    const float largest = most > -least ? most : -least;
    bf16 scale = to_bf16(largest / 127.f);
    if (to_float(scale) * 127.f < largest) scale++;  // rounded down, it would cut off the largest
    a = {to_float(scale), -128.f * to_float(scale)};
  }
  const float limit = PM_WEIGHT_BITS == 4 ? 15.f : 255.f;
  for (int64_t i = 0; i < PM_GROUP; i++) {
    const float u = i < count && a.scale > 0.f ? std::nearbyint((to_float(w[i]) - a.low) / a.scale) : PM_WEIGHT_BITS == 8 ? 128.f : 0.f;
    out[i] = uint8_t(u < 0.f ? 0.f : u > limit ? limit : u);
  }
  return a;
}

// Copies panels [begin, end) of w[n, k] into the panel layout.
static void pack_panels(const bf16* w, int64_t n, int64_t k, Weight* out, int64_t begin, int64_t end) {
  const int64_t groups = groups_of(k);
  for (int64_t p = begin; p < end; p++) {
    Weight* panel = out + p * panel_elements(k);
    std::memset(panel, 0, size_t(panel_elements(k)));
    for (int64_t c = 0; c < PANEL; c++) {
      const bf16* row = w + (p * PANEL + c) * k;
      const bool there = p * PANEL + c < n;
      for (int64_t g = 0; g < groups; g++) {
        uint8_t u[PM_GROUP];
        const int64_t left = there ? k - g * PM_GROUP : 0;
        const Affine a = quantise(row + g * PM_GROUP, left < PM_GROUP ? left : PM_GROUP, u);
        Weight* group = panel + g * GROUP_BYTES;
        for (int i = 0; i < PM_GROUP; i++) {
          const int64_t vector = i / 4, at = c * 4 + i % 4;
          if (PM_WEIGHT_BITS == 8) group[vector * PANEL * 4 + at] = u[i];
          else group[vector / 2 * PANEL * 4 + at] |= uint8_t(u[i] << (vector % 2 * 4));
        }
        bf16* tail = (bf16*)(group + VECTOR_BYTES);
        tail[c] = to_bf16(a.scale);
        if (PM_WEIGHT_BITS == 4) tail[PANEL + c] = to_bf16(a.low);
      }
    }
  }
}

// acc[i][j] += the products of one group, whose vectors begin at w.
template <int MR, bool FETCH>
static inline __attribute__((always_inline)) void group_tile(const Input* x, int64_t ldx, const Weight* w, I (&acc)[MR][PM_PANEL_VECS]) {
  const auto add = [&](const I (&b)[PM_PANEL_VECS], int quad) __attribute__((always_inline)) {
    PM_UNROLL_LOOP(14)
    for (int i = 0; i < MR; i++) {
      uint32_t four;
      std::memcpy(&four, x + i * ldx + quad * 4, 4);
      const I a = bquad(four);
      PM_UNROLL_LOOP(4)
      for (int j = 0; j < PM_PANEL_VECS; j++) acc[i][j] = dot4(acc[i][j], b[j], a);
    }
  };
  PM_UNROLL_LOOP(PM_UNROLL)
  for (int v = 0; v < PM_GROUP * PM_WEIGHT_BITS / 32; v++) {
    I b[PM_PANEL_VECS], high[PM_PANEL_VECS];
    PM_UNROLL_LOOP(4)
    for (int j = 0; j < PM_PANEL_VECS; j++) {
      const Weight* p = w + (v * PM_PANEL_VECS + j) * 64;
      if (FETCH) prefetch(p + PM_PREFETCH);
      b[j] = bload(p);
      if (PM_WEIGHT_BITS == 4) high[j] = high_nibbles(b[j]), b[j] = low_nibbles(b[j]);
    }
    if (PM_WEIGHT_BITS == 8) add(b, v);
    else add(b, 2 * v), add(high, 2 * v + 1);
  }
}

// out[MR][PANEL] += one group's products, turned back to floats. Not inlined, so that the sums keep the registers to themselves.
template <int MR, bool FIRST>
static __attribute__((noinline)) void add_group(const Input* x, int64_t ldx, const Weight* group, const float* scale, const int32_t* total, float* out) {
  I acc[MR][PM_PANEL_VECS];
  PM_UNROLL_LOOP(14)
  for (int i = 0; i < MR; i++)
    PM_UNROLL_LOOP(4)
    for (int j = 0; j < PM_PANEL_VECS; j++) acc[i][j] = iset(PM_WEIGHT_BITS == 8 ? -128 * total[i] : 0);
  group_tile<MR, FIRST && PM_PREFETCH>(x, ldx, group, acc);
  const bf16* tail = (const bf16*)(group + VECTOR_BYTES);
  PM_UNROLL_LOOP(14)
  for (int i = 0; i < MR; i++)
    PM_UNROLL_LOOP(4)
    for (int j = 0; j < PM_PANEL_VECS; j++) {
      V y = vmul(vmul(ifloat(acc[i][j]), vset(scale[i])), vload_bf16(tail + j * LANES));
      if (PM_WEIGHT_BITS == 4) y = vfma(vset(float(total[i]) * scale[i]), vload_bf16(tail + PANEL + j * LANES), y);
      float* to = out + i * PANEL + j * LANES;
      vstore(to, vadd(vload(to), y));
    }
}

// out[MR][PANEL] = x[MR, k] . panel `p` of w
template <int MR, bool FIRST>
static __attribute__((noinline)) void panel_product(const Input* x, int64_t ldx, const Weight* w, int64_t, int64_t k, int64_t p, const Weight*, float* out) {
  const int64_t groups = groups_of(k);
  const Weight* panel = w + p * panel_elements(k);
  for (int i = 0; i < MR * PANEL; i += LANES) vstore(out + i, vzero());
  for (int64_t g = 0; g < groups; g++) {
    float scale[MR];
    int32_t total[MR];
    for (int i = 0; i < MR; i++) {
      const Input* tail = x + i * ldx + groups * PM_GROUP + g * 4;
      std::memcpy(scale + i, tail, 4), std::memcpy(total + i, tail + groups * 4, 4);
    }
    add_group<MR, FIRST>(x + g * PM_GROUP, ldx, panel + g * GROUP_BYTES, scale, total, out);
  }
}
