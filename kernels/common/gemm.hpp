// y[rows, n] = x[rows, k] . w[n, k]^T with float32 sums. PM_WEIGHT_BITS says what w is kept as: 16 bf16, 12 bf16 coded, 8 or 4
// integers.
// The order of every sum is fixed by k alone: a row's result does not depend on how many rows are in the call.
#pragma once
#include "team.hpp"
#include "tile.hpp"

#ifndef PM_WEIGHT_BITS
#define PM_WEIGHT_BITS 16
#endif
#ifndef PM_PANEL_VECS  // panel width in vectors of 16 outputs
#define PM_PANEL_VECS 3
#endif
#ifndef PM_ROW_TILE  // most rows of x in one tile of vectors: PM_ROW_TILE * PM_PANEL_VECS accumulators must fit the registers
#define PM_ROW_TILE 8
#endif
#ifndef PM_PREFETCH  // bytes ahead in the weight stream, 0 for none
#define PM_PREFETCH 2048
#endif

#ifndef PM_DEAL  // 1: panels go to the threads in turn, which read the weights as one stream; 0: each thread has a stretch of its own
#define PM_DEAL 0
#endif

constexpr int PANEL = 16 * PM_PANEL_VECS;
static_assert(PM_ROW_TILE >= 1 && PM_ROW_TILE <= 14, "PM_ROW_TILE is 1 to 14");
static_assert(PM_ROW_TILE * PM_PANEL_VECS <= 28, "the tile does not fit 32 registers");
static inline int64_t padded_n(int64_t n) { return round_up(n, PANEL); }  // columns of y

#define PM_ENCODED (PM_WEIGHT_BITS < 12)  // whether inputs are encoded too
#if PM_ENCODED
#include "weights_int.hpp"
#else
#include "weights_bf16.hpp"
#endif
#if PM_WEIGHT_BITS == 12
#include "weights_coded.hpp"
#endif

struct Matrix {
  const Weight* data;
  int64_t n, k;
  int64_t panels() const { return padded_n(n) / PANEL; }
};

#if PM_WEIGHT_BITS != 12
static void pack(const bf16* w, int64_t n, int64_t k, Weight* out, int64_t threads) {
  parallel(int(threads), [&](int id, int count) {
    const Range r = share(padded_n(n) / PANEL, id, count);
    pack_panels(w, n, k, out, r.begin, r.end);
  });
}
static inline const Weight* open_panel(const Weight*, int64_t, int64_t, int64_t, int) { return nullptr; }
#endif

// out[rows][PANEL] = x[rows, k] . panel p of w, 1 to ROW_TILE rows. `first`: no earlier tile has read the panel. `opened`: the panel
// as `open_panel` gave it.
static __attribute__((noinline)) void product(int rows, const Input* x, int64_t ldx, const Matrix& w, int64_t p, const Weight* opened, bool first, float* out) {
  with_rows<ROW_TILE>(rows, [&](auto mr) {
    if (first) return panel_product<mr(), true>(x, ldx, w.data, w.n, w.k, p, opened, out);
    panel_product<mr(), false>(x, ldx, w.data, w.n, w.k, p, opened, out);
  });
}

// Panels of `count` that belong to thread `id`.
static inline Range share_panels(int64_t count, int id, int threads) { return PM_DEAL ? Range{id, count, threads} : share(count, id, threads); }

// Calls f(first row, rows) over near-equal tiles of at most ROW_TILE rows.
template <class F>
static inline void for_row_tiles(int64_t rows, F&& f) {
  const int64_t tiles = (rows + ROW_TILE - 1) / ROW_TILE;
  for (int64_t t = 0; t < tiles; t++) f(rows * t / tiles, int(rows * (t + 1) / tiles - rows * t / tiles));
}

// emit(row, column, 16 outputs) for the panels of `w` in `range`. x is [rows, ldx]; with an odd k element k of a row is finite.
template <class Emit>
static inline void matmul(const Input* x, int64_t ldx, int64_t rows, const Matrix& w, Range range, Emit&& emit) {
  alignas(64) float out[ROW_TILE * PANEL];
  for (int64_t p = range.begin; p < range.end; p += range.step) {
    const Weight* opened = open_panel(w.data, w.k, p, rows, 0);
    for_row_tiles(rows, [&](int64_t first, int count) {
      product(count, x + first * ldx, ldx, w, p, opened, first == 0, out);
      for (int i = 0; i < count; i++)
        for (int c = 0; c < PANEL; c += LANES) emit(first + i, p * PANEL + c, vload(out + i * PANEL + c));
    });
  }
}

// emit(row, column, 16 outputs of `a`, 16 of `b`) for two matrices of one shape.
template <class Emit>
static inline void matmul_pair(const Input* x, int64_t ldx, int64_t rows, const Matrix& a, const Matrix& b, Range range, Emit&& emit) {
  alignas(64) float out[2][ROW_TILE * PANEL];
  for (int64_t p = range.begin; p < range.end; p += range.step) {
    const Weight *opened_a = open_panel(a.data, a.k, p, rows, 0), *opened_b = open_panel(b.data, b.k, p, rows, 1);
    for_row_tiles(rows, [&](int64_t first, int count) {
      product(count, x + first * ldx, ldx, a, p, opened_a, first == 0, out[0]);
      product(count, x + first * ldx, ldx, b, p, opened_b, first == 0, out[1]);
      for (int i = 0; i < count; i++)
        for (int c = 0; c < PANEL; c += LANES)
          emit(first + i, p * PANEL + c, vload(out[0] + i * PANEL + c), vload(out[1] + i * PANEL + c));
    });
  }
}
