// The product tile that linear layers and attention share: a few rows of x against vectors of 16 outputs, in registers.
#pragma once
#include <type_traits>

#include "simd.hpp"

#ifndef PM_UNROLL  // pairs of k an iteration
#define PM_UNROLL 4
#endif
#define PM_PRAGMA(x) _Pragma(#x)
#define PM_UNROLL_LOOP(n) PM_PRAGMA(GCC unroll n)

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

// out[MR][16 * NV] = acc. Unrolled, or the compiler keeps the sums in memory as well.
template <int MR, int NV>
static inline __attribute__((always_inline)) void store(const V (&acc)[MR][NV], float* out, int64_t stride) {
  PM_UNROLL_LOOP(14)
  for (int i = 0; i < MR; i++)
    PM_UNROLL_LOOP(4)
    for (int j = 0; j < NV; j++) vstore(out + i * stride + j * 16, acc[i][j]);
}

// Calls f(integral_constant<rows>) for a number of rows known at run time only, 1 to MOST.
template <int MOST, class F>
static inline void with_rows(int rows, F&& f) {
  if (rows == MOST) return f(std::integral_constant<int, MOST>{});
  if constexpr (MOST > 1) with_rows<MOST - 1>(rows, f);
}
