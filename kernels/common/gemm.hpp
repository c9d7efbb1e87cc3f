// y[rows, n] = x[rows, k] . w[n, k]^T with bf16 operands and float32 sums, in two weight layouts (PM_LAYOUT):
//   1 panels: w repacked as [n / PANEL][k / 2][PANEL][2]. One stream of whole cache lines, no horizontal sums, and the same
//     tile serves one row (decode) and many (prefill). n and k are padded with zeros.
//   0 rows: w as it lies in the checkpoint; a dot product per output, summed across lanes at the end. Nothing is copied.
// The order of every sum is fixed by k alone: a row's result does not depend on how many rows are in the call.
#pragma once
#include <type_traits>

#include "simd.hpp"
#include "team.hpp"

#ifndef PM_LAYOUT
#define PM_LAYOUT 1
#endif
#ifndef PM_PANEL_VECS  // panel width in vectors of 16 outputs
#define PM_PANEL_VECS 3
#endif
#ifndef PM_ROW_TILE  // most rows of x in one tile: PM_ROW_TILE * PM_PANEL_VECS accumulators must fit the registers
#define PM_ROW_TILE 8
#endif
#ifndef PM_PREFETCH  // bytes ahead in the weight stream, 0 for none
#define PM_PREFETCH 2048
#endif
#ifndef PM_UNROLL  // pairs of k an iteration
#define PM_UNROLL 4
#endif
#define PM_PRAGMA(x) _Pragma(#x)
#define PM_UNROLL_LOOP(n) PM_PRAGMA(GCC unroll n)

constexpr int PANEL = 16 * PM_PANEL_VECS;
static_assert(PM_ROW_TILE >= 1 && PM_ROW_TILE <= 14, "PM_ROW_TILE is 1 to 14");
static_assert(PM_ROW_TILE * PM_PANEL_VECS <= 28, "the tile does not fit 32 registers");

// Row stride of x: whole vectors of pairs; not a multiple of 1 KB, where the rows of a tile would share few cache sets.
static inline int64_t padded_k(int64_t k) { return round_up(k, 32) + (round_up(k, 32) % 512 ? 0 : 32); }
static inline int64_t padded_n(int64_t n) { return round_up(n, PANEL); }  // columns of y
static inline int64_t packed_elements(int64_t n, int64_t k) { return padded_n(n) * round_up(k, 2); }

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

// acc[i][j] += x[i, 0:2*pairs] . w, the weights of pair q being NV vectors at w + q * stride. With FETCH, what lies `ahead`
// bytes from each vector is prefetched.
template <int MR, int NV, bool FETCH>
static inline __attribute__((always_inline)) void tile(const bf16* x, int64_t ldx, const bf16* w, int64_t stride, int64_t pairs,
                                                       int64_t ahead, V (&acc)[MR][NV]) {
  const auto step = [&](int64_t q) __attribute__((always_inline)) {
    W b[NV];
    PM_UNROLL_LOOP(4)
    for (int j = 0; j < NV; j++) {
      b[j] = wload(w + q * stride + j * 32);
      if (FETCH) prefetch((const char*)(w + q * stride + j * 32) + ahead);
    }
    PM_UNROLL_LOOP(14)
    for (int i = 0; i < MR; i++) {
      const W a = wpair(load_pair(x + i * ldx + 2 * q));
      PM_UNROLL_LOOP(4)
      for (int j = 0; j < NV; j++) acc[i][j] = dot2(acc[i][j], b[j], a);
    }
  };
  PM_UNROLL_LOOP(PM_UNROLL)
  for (int64_t q = 0; q < pairs; q++) step(q);
}

template <int MR, int NV>
static inline __attribute__((always_inline)) void clear(V (&acc)[MR][NV]) {
  PM_UNROLL_LOOP(14)
  for (int i = 0; i < MR; i++)
    PM_UNROLL_LOOP(4)
    for (int j = 0; j < NV; j++) acc[i][j] = vzero();
}

// Calls f(integral_constant<rows>) for a number of rows known at run time only, 1 to MOST.
template <int MOST, class F>
static inline void with_rows(int rows, F&& f) {
  if (rows == MOST) return f(std::integral_constant<int, MOST>{});
  if constexpr (MOST > 1) with_rows<MOST - 1>(rows, f);
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

struct Matrix {
  const bf16* data;
  int64_t n, k;
  int64_t panels() const { return padded_n(n) / PANEL; }
};

// out[rows][PANEL] = x[rows, k] . panel p of w, 1 to PM_ROW_TILE rows. `first`: no earlier tile has read the panel.
static __attribute__((noinline)) void product(int rows, const bf16* x, int64_t ldx, const Matrix& w, int64_t p, bool first, float* out) {
  with_rows<PM_ROW_TILE>(rows, [&](auto mr) {
    if (first) return panel_product<mr(), true>(x, ldx, w.data, w.n, w.k, p, out);
    panel_product<mr(), false>(x, ldx, w.data, w.n, w.k, p, out);
  });
}

// Calls f(first row, rows) over near-equal tiles of at most PM_ROW_TILE rows.
template <class F>
static inline void for_row_tiles(int64_t rows, F&& f) {
  const int64_t tiles = (rows + PM_ROW_TILE - 1) / PM_ROW_TILE;
  for (int64_t t = 0; t < tiles; t++) f(rows * t / tiles, int(rows * (t + 1) / tiles - rows * t / tiles));
}

// emit(row, column, 16 outputs) for the panels of `w` in `range`. x is [rows, ldx]; with an odd k element k of a row is finite.
template <class Emit>
static inline void matmul(const bf16* x, int64_t ldx, int64_t rows, const Matrix& w, Range range, Emit&& emit) {
  alignas(64) float out[PM_ROW_TILE * PANEL];
  for (int64_t p = range.begin; p < range.end; p++)
    for_row_tiles(rows, [&](int64_t first, int count) {
      product(count, x + first * ldx, ldx, w, p, first == 0, out);
      for (int i = 0; i < count; i++)
        for (int c = 0; c < PANEL; c += LANES) emit(first + i, p * PANEL + c, vload(out + i * PANEL + c));
    });
}

// emit(row, column, 16 outputs of `a`, 16 of `b`) for two matrices of one shape.
template <class Emit>
static inline void matmul_pair(const bf16* x, int64_t ldx, int64_t rows, const Matrix& a, const Matrix& b, Range range, Emit&& emit) {
  alignas(64) float out[2][PM_ROW_TILE * PANEL];
  for (int64_t p = range.begin; p < range.end; p++)
    for_row_tiles(rows, [&](int64_t first, int count) {
      product(count, x + first * ldx, ldx, a, p, first == 0, out[0]);
      product(count, x + first * ldx, ldx, b, p, first == 0, out[1]);
      for (int i = 0; i < count; i++)
        for (int c = 0; c < PANEL; c += LANES)
          emit(first + i, p * PANEL + c, vload(out[0] + i * PANEL + c), vload(out[1] + i * PANEL + c));
    });
}
