// Weights as bf16 in two layouts (PM_LAYOUT):
//   1 panels: w repacked as [n / PANEL][k / 2][PANEL][2]. One stream of whole cache lines, no horizontal sums, and the same
//     tile serves one row (decode) and many (prefill). n and k are padded with zeros.
//   0 rows: w as it lies in the checkpoint; a dot product per output, summed across lanes at the end. Nothing is copied.
// Inputs are bf16 rows as they are.
#pragma once
#include "tile.hpp"

#ifndef PM_LAYOUT
#define PM_LAYOUT 1
#endif

using Weight = bf16;
using Input = bf16;

// Row stride of x: whole vectors of pairs; not a multiple of 1 KB, where the rows of a tile would share few cache sets.
static inline int64_t padded_k(int64_t k) { return round_up(k, 32) + (round_up(k, 32) % 512 ? 0 : 32); }
static inline int64_t input_stride(int64_t k) { return padded_k(k); }
static inline int64_t panel_elements(int64_t k) { return PANEL * (PM_LAYOUT ? round_up(k, 2) : k); }
static inline int64_t packed_bytes(int64_t n, int64_t k) { return round_up(n, PANEL) * round_up(k, 2) * int64_t(sizeof(bf16)); }

// Copies panels [begin, end) of w[n, k] into the panel layout.
static void pack_panels(const bf16* w, int64_t n, int64_t k, bf16* out, int64_t begin, int64_t end) {
  const int64_t k2 = round_up(k, 2);
  for (int64_t p = begin; p < end; p++)
    for (int64_t c = 0; c < PANEL; c++) {
      const int64_t row = p * PANEL + c;
      bf16* to = out + p * PANEL * k2 + c * 2;
      for (int64_t j = 0; j < k2; j++) to[(j / 2) * PANEL * 2 + (j & 1)] = row < n && j < k ? w[row * k + j] : bf16(0);
    }
}

// out[MR][PANEL] = x[MR, k] . panel `p` of w[n, k]. Not inlined, so that it is compiled once for each MR.
#if PM_LAYOUT == 1

template <int MR, bool FIRST>
static __attribute__((noinline)) void panel_product(const bf16* x, int64_t ldx, const bf16* w, int64_t, int64_t k, int64_t p, float* out) {
  const int64_t pairs = (k + 1) / 2;
  V acc[MR][PM_PANEL_VECS];
  clear(acc);
  tile<MR, PM_PANEL_VECS, FIRST && PM_PREFETCH>(x, ldx, w + p * PANEL * pairs * 2, PANEL * 2, pairs, PM_PREFETCH, acc);
  for (int i = 0; i < MR; i++)
    for (int j = 0; j < PM_PANEL_VECS; j++) vstore(out + i * PANEL + j * 16, acc[i][j]);
}

#else

// GROUP outputs of MR rows: dot products along k, each in one accumulator.
template <int MR, int GROUP, bool FIRST>
static inline __attribute__((always_inline)) void row_group(const bf16* x, int64_t ldx, const bf16* const* w, int64_t k, float* out) {
  V acc[MR][GROUP];
  clear(acc);
  const auto step = [&](int64_t q, int left) __attribute__((always_inline)) {
    W b[GROUP];
    PM_UNROLL_LOOP(4)
    for (int j = 0; j < GROUP; j++) {
      b[j] = left >= 32 ? wload(w[j] + q) : wload_first(w[j] + q, left);
      if (FIRST && PM_PREFETCH) prefetch((const char*)(w[j] + q) + PM_PREFETCH);
    }
    PM_UNROLL_LOOP(14)
    for (int i = 0; i < MR; i++) {
      const W a = left >= 32 ? wload(x + i * ldx + q) : wload_first(x + i * ldx + q, left);
      PM_UNROLL_LOOP(4)
      for (int j = 0; j < GROUP; j++) acc[i][j] = dot2(acc[i][j], b[j], a);
    }
  };
  int64_t q = 0;
  for (; q + 32 <= k; q += 32) step(q, 32);
  if (q < k) step(q, int(k - q));
  for (int i = 0; i < MR; i++)
    for (int j = 0; j < GROUP; j++) out[i * PANEL + j] = vsum(acc[i][j]);
}

template <int MR, bool FIRST>
static __attribute__((noinline)) void panel_product(const bf16* x, int64_t ldx, const bf16* w, int64_t n, int64_t k, int64_t p, float* out) {
  constexpr int GROUP = MR <= 6 ? 4 : 2;
  for (int c = 0; c < PANEL; c += GROUP) {
    const int64_t row = p * PANEL + c;
    const bf16* rows[GROUP];
    for (int j = 0; j < GROUP; j++) rows[j] = w + (row + j < n ? row + j : n - 1) * k;
    row_group<MR, GROUP, FIRST>(x, ldx, rows, k, out + c);
    for (int j = 0; j < GROUP; j++)  // columns past n stay zero, as the panel layout's padding does
      for (int i = 0; row + j >= n && i < MR; i++) out[i * PANEL + c + j] = 0.f;
  }
}

#endif
