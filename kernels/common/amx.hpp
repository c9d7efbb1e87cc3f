// Tile registers (AMX) for products of bf16: eight of up to 16 rows of 64 bytes, their shapes configured by the thread that uses them.
//   sums[rows][16] += x[rows][pairs][2] . w[pairs][16][2]
// With PM_AMX_EMULATE the same functions are plain C++ that gives the instructions' bits on any CPU, and stops where they fault.
#pragma once
#include <type_traits>

#include "simd.hpp"

#if PM_AMX
#if defined(__linux__) && !defined(PM_AMX_EMULATE)
#include <sys/syscall.h>
#include <unistd.h>
#endif

constexpr int TILE_ROWS = 16, TILE_PAIRS = 16;  // of pairs of bf16, and so of floats, in a row

struct alignas(64) TileShapes {  // laid out as the processor reads it
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
  void set(int tile, int row_count, int pairs) { rows[tile] = uint8_t(row_count), row_bytes[tile] = uint16_t(pairs * 4); }
};
static_assert(sizeof(TileShapes) == 64, "the processor reads 64 bytes");

// Calls f(integral_constant<0>) to f(integral_constant<N - 1>): an instruction names its registers by constants.
template <int N, class F>
static inline __attribute__((always_inline)) void each_tile(F&& f) {
  if constexpr (N > 0) each_tile<N - 1>(f), f(std::integral_constant<int, N - 1>{});
}

#ifndef PM_AMX_EMULATE

// Written as assembly because GCC 12's intrinsics take a register's number as text, not as a template's constant, and let loads
// pass earlier stores.
static inline void tile_configure(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
static inline void tile_release() { asm volatile("tilerelease" ::: "memory"); }
template <int T>
static inline __attribute__((always_inline)) void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
static inline __attribute__((always_inline)) void tile_load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
static inline __attribute__((always_inline)) void tile_store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}
template <int SUMS, int X, int W_>
static inline __attribute__((always_inline)) void tile_dot() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(X), "i"(W_));
}

// Whether the system lets this process use tiles: Linux grants their state on request, once for all threads.
static inline bool tiles_permitted() {
#ifdef __linux__
  constexpr long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
  return false;
#endif
}

#else

struct TileState {
  TileShapes shapes;
  alignas(64) uint8_t data[8][TILE_ROWS][64];
};
static thread_local TileState tiles;

static inline void fault_unless(bool allowed) {
  if (!allowed) __builtin_trap();
}

static inline void tile_configure(const TileShapes& shapes) {
  for (int t = 0; t < 8; t++) fault_unless(shapes.rows[t] <= TILE_ROWS && shapes.row_bytes[t] <= 64 && !shapes.rows[t] == !shapes.row_bytes[t]);
  tiles.shapes = shapes;
  std::memset(tiles.data, 255, sizeof tiles.data);  // NaN: what was not set must not be used
}
static inline void tile_release() { tiles.shapes = TileShapes(); }

template <int T>
static inline void tile_zero() {
  fault_unless(tiles.shapes.rows[T]);
  std::memset(tiles.data[T], 0, sizeof tiles.data[T]);
}
template <int T>
static inline void tile_load(const void* from, int64_t stride) {
  tile_zero<T>();
  for (int r = 0; r < tiles.shapes.rows[T]; r++) std::memcpy(tiles.data[T][r], (const char*)from + r * stride, tiles.shapes.row_bytes[T]);
}
template <int T>
static inline void tile_store(void* to, int64_t stride) {
  fault_unless(tiles.shapes.rows[T]);
  for (int r = 0; r < tiles.shapes.rows[T]; r++) std::memcpy((char*)to + r * stride, tiles.data[T][r], tiles.shapes.row_bytes[T]);
}

// Denormals count as zero and results that would be ones become zero, whatever mode the thread's other floats are in.
static inline float flushed(float x) { return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.f, x) : x; }
static inline float tile_fma(bf16 x, bf16 w, float sum) { return flushed(std::fma(flushed(to_float(x)), flushed(to_float(w)), sum)); }

// Even and odd elements are summed apart from zero, added to each other, then to what is there.
static inline void tile_dot_row(const bf16* x, const uint8_t (*w)[64], int pairs, int columns, float* sums) {
  float even[TILE_PAIRS] = {}, odd[TILE_PAIRS] = {};
  for (int q = 0; q < pairs; q++) {
    bf16 row[2 * TILE_PAIRS];
    std::memcpy(row, w[q], sizeof row);
    for (int c = 0; c < columns; c++) {
      even[c] = tile_fma(x[2 * q], row[2 * c], even[c]);
      odd[c] = tile_fma(x[2 * q + 1], row[2 * c + 1], odd[c]);
    }
  }
  for (int c = 0; c < columns; c++) sums[c] = flushed(flushed(sums[c]) + flushed(even[c] + odd[c]));
}

template <int SUMS, int X, int W_>
static inline void tile_dot() {
  const TileShapes& s = tiles.shapes;
  fault_unless(s.rows[SUMS] && s.rows[SUMS] == s.rows[X] && s.row_bytes[SUMS] == s.row_bytes[W_] && s.row_bytes[X] == s.rows[W_] * 4);
  for (int r = 0; r < s.rows[SUMS]; r++) {
    bf16 x[2 * TILE_PAIRS];
    float sums[TILE_PAIRS];
    std::memcpy(x, tiles.data[X][r], sizeof x), std::memcpy(sums, tiles.data[SUMS][r], sizeof sums);
    tile_dot_row(x, tiles.data[W_], s.rows[W_], s.row_bytes[SUMS] / 4, sums);
    std::memcpy(tiles.data[SUMS][r], sums, sizeof sums);
  }
}

static inline bool tiles_permitted() { return true; }

#endif
#endif
