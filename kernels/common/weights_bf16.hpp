// Weights as bf16 in two layouts (PM_LAYOUT):
//   1 panels: w repacked as [n / PANEL][k / 2][PANEL][2]. One stream of whole cache lines, no horizontal sums, and the same
//     tile serves one row (decode) and many (prefill). n and k are padded with zeros. AMX loads its tiles from it as it is.
//   0 rows: w as it lies in the checkpoint; a dot product per output, summed across lanes at the end. Nothing is copied.
// Inputs are bf16 rows as they are.
#pragma once
#include "amx.hpp"
#include "tile.hpp"

#ifndef PM_LAYOUT
#define PM_LAYOUT 1
#endif

#define PM_TILES (PM_LAYOUT == 1 && PM_AMX)
#if PM_TILES
constexpr int ROW_TILE = TILE_ROWS;  // most rows in a product: fewer would leave rows of the tile registers empty
#else
constexpr int ROW_TILE = PM_ROW_TILE;
#endif

using Weight = bf16;
using Input = bf16;

// Row stride of x: whole vectors of pairs; not a multiple of 1 KB, where the rows of a tile would share few cache sets.
static inline int64_t padded_k(int64_t k) { return round_up(k, 32) + (round_up(k, 32) % 512 ? 0 : 32); }
static inline int64_t input_stride(int64_t k) { return padded_k(k); }

// out[MR][PANEL] = x[MR, k] . panel `p` of w[n, k]. Not inlined, so that it is compiled once for each MR.
#if PM_TILES

// Eight tiles: sums for each vector of the panel, x, weights, and what is left of k, which has shapes of its own: x may end where
// k does, and another panel begins where this one's weights end.
enum PanelTile { TILE_X = 4, TILE_W, TILE_X_TAIL, TILE_W_TAIL };
static_assert(PM_PANEL_VECS <= TILE_X, "PM_PANEL_VECS is 1 to 4");

static TileShapes panel_shapes(int rows, int tail) {
  TileShapes shapes;
  for (int c = 0; c < PM_PANEL_VECS; c++) shapes.set(c, rows, TILE_PAIRS);
  shapes.set(TILE_X, rows, TILE_PAIRS), shapes.set(TILE_W, TILE_PAIRS, TILE_PAIRS);
  if (tail) shapes.set(TILE_X_TAIL, rows, tail), shapes.set(TILE_W_TAIL, tail, TILE_PAIRS);
  return shapes;
}

template <int X, int W_>
static inline __attribute__((always_inline)) void add_tiles(const bf16* x, int64_t ldx, const bf16* w) {
  tile_load<X>(x, ldx * int64_t(sizeof(bf16)));
  each_tile<PM_PANEL_VECS>([&](auto c) __attribute__((always_inline)) {
    tile_load<W_>(w + c * 32, PANEL * 4);
    tile_dot<c, X, W_>();
  });
}

// Shapes are set for each product and let go after it: so it does not matter what else in the process uses tiles on this thread.
static __attribute__((noinline)) void tile_product(int rows, bool fetch, const bf16* x, int64_t ldx, const bf16* panel, int64_t pairs, float* out) {
  const int tail = int(pairs % TILE_PAIRS);
  tile_configure(panel_shapes(rows, tail));
  each_tile<PM_PANEL_VECS>([](auto c) { tile_zero<c>(); });
  int64_t q = 0;
  for (; q + TILE_PAIRS <= pairs; q += TILE_PAIRS) {
    const bf16* w = panel + q * PANEL * 2;
    for (int64_t at = 0; fetch && at < TILE_PAIRS * PANEL * 2; at += 32) prefetch((const char*)(w + at) + PM_PREFETCH);
    add_tiles<TILE_X, TILE_W>(x + 2 * q, ldx, w);
  }
  if (tail) add_tiles<TILE_X_TAIL, TILE_W_TAIL>(x + 2 * q, ldx, panel + q * PANEL * 2);
  each_tile<PM_PANEL_VECS>([&](auto c) { tile_store<c>(out + c * 16, PANEL * 4); });
  tile_release();
}

template <int MR, bool FIRST>
static inline void plain_product(const bf16* x, int64_t ldx, const bf16* w, int64_t, int64_t k, int64_t p, float* out) {
  const int64_t pairs = (k + 1) / 2;
  tile_product(MR, FIRST && PM_PREFETCH, x, ldx, w + p * PANEL * pairs * 2, pairs, out);
}

#elif PM_LAYOUT == 1

template <int MR, bool FIRST>
static __attribute__((noinline)) void plain_product(const bf16* x, int64_t ldx, const bf16* w, int64_t, int64_t k, int64_t p, float* out) {
  const int64_t pairs = (k + 1) / 2;
  V acc[MR][PM_PANEL_VECS];
  clear(acc);
  tile<MR, PM_PANEL_VECS, FIRST && PM_PREFETCH>(x, ldx, w + p * PANEL * pairs * 2, PANEL * 2, pairs, PM_PREFETCH, acc);
  store(acc, out, PANEL);
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
static __attribute__((noinline)) void plain_product(const bf16* x, int64_t ldx, const bf16* w, int64_t n, int64_t k, int64_t p, float* out) {
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

#if PM_WEIGHT_BITS == 16
static inline int64_t panel_elements(int64_t k) { return PANEL * (PM_LAYOUT ? round_up(k, 2) : k); }
static inline int64_t packed_bytes(const bf16*, int64_t n, int64_t k, int64_t) { return round_up(n, PANEL) * round_up(k, 2) * int64_t(sizeof(bf16)); }

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

template <int MR, bool FIRST>
static inline void panel_product(const bf16* x, int64_t ldx, const bf16* w, int64_t n, int64_t k, int64_t p, const bf16*, float* out) {
  plain_product<MR, FIRST>(x, ldx, w, n, k, p, out);
}

#endif
