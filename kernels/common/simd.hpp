// Sixteen float lanes and thirty-two bf16 lanes, in four implementations chosen at compile time by PM_ISA:
//   5 as 4, and the tile registers of amx.hpp, 4 AVX512 with BF16 dot products, 3 AVX512 (F, BW, DQ, VL), 2 AVX2 with FMA,
//   0 portable C++.
// Everything above this file is written once on these types. Sums keep the same order in every kernel that uses them, so a
// row's result depends neither on how many rows share the step nor on the number of threads.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#ifndef PM_ISA
#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512BF16__)
#define PM_ISA 5
#elif defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define PM_ISA 4
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define PM_ISA 3
#elif defined(__AVX2__) && defined(__FMA__)
#define PM_ISA 2
#else
#define PM_ISA 0
#endif
#endif
#if PM_ISA == 5 && !(defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512BF16__))
#error "PM_ISA 5 needs a CPU with AMX for BF16: take 4, 3, 2 or 0"
#elif PM_ISA == 4 && !defined(__AVX512BF16__)
#error "PM_ISA 4 needs a CPU with AVX512 BF16: take 3, 2 or 0"
#elif PM_ISA == 3 && !defined(__AVX512BW__)
#error "PM_ISA 3 needs a CPU with AVX512: take 2 or 0"
#elif PM_ISA == 2 && !(defined(__AVX2__) && defined(__FMA__))
#error "PM_ISA 2 needs a CPU with AVX2 and FMA: take 0"
#endif
#if PM_ISA > 0
#include <immintrin.h>
#endif
#if PM_ISA == 5 || defined(PM_AMX_EMULATE)  // tile registers, or plain C++ in their place beside any of the others
#define PM_AMX 1
#else
#define PM_AMX 0
#endif

using bf16 = uint16_t;
constexpr int LANES = 16;
constexpr float MINUS_INF = -std::numeric_limits<float>::infinity();

static inline float to_float(bf16 x) {
  uint32_t bits = uint32_t(x) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

static inline bf16 to_bf16(float f) {  // round to nearest even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return bf16((bits >> 16) | 0x40);
  return bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline uint32_t load_pair(const bf16* p) {
  uint32_t v;
  std::memcpy(&v, p, 4);
  return v;
}

#ifndef PM_PREFETCH_LEVEL  // 1: into the first-level cache, 2: into the second
#define PM_PREFETCH_LEVEL 2
#endif
static inline void prefetch(const void* p) { __builtin_prefetch(p, 0, PM_PREFETCH_LEVEL == 1 ? 3 : 2); }

// ---- V: 16 floats. W: 32 bf16, lane i holding elements 2i (low half) and 2i+1 (high half). -------------------------------
#if PM_ISA >= 3

using V = __m512;
using W = __m512i;
static inline V vzero() { return _mm512_setzero_ps(); }
static inline V vset(float x) { return _mm512_set1_ps(x); }
static inline V vload(const float* p) { return _mm512_loadu_ps(p); }
static inline void vstore(float* p, V a) { _mm512_storeu_ps(p, a); }
static inline V vadd(V a, V b) { return _mm512_add_ps(a, b); }
static inline V vsub(V a, V b) { return _mm512_sub_ps(a, b); }
static inline V vmul(V a, V b) { return _mm512_mul_ps(a, b); }
static inline V vdiv(V a, V b) { return _mm512_div_ps(a, b); }
static inline V vfma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
static inline V vinverse(V a) {  // 1 / a of a normal number, relative error below 2e-7
  const V r = _mm512_rcp14_ps(a);
  return _mm512_fmadd_ps(_mm512_fnmadd_ps(a, r, vset(1.f)), r, r);
}
static inline V vmax(V a, V b) { return _mm512_max_ps(a, b); }
static inline float vsum(V a) { return _mm512_reduce_add_ps(a); }
static inline float vmaximum(V a) { return _mm512_reduce_max_ps(a); }
static inline V vround(V a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline V vscale2(V a, V n) { return _mm512_scalef_ps(a, n); }  // a * 2^n
static inline V vzero_below(V a, V x, float limit) {                  // a where x >= limit, else 0
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_GE_OQ), a);
}
static inline V vfirst(V a, int n, float fill) {  // lanes below n, the others replaced
  return _mm512_mask_mov_ps(_mm512_set1_ps(fill), __mmask16((1u << n) - 1), a);
}
static inline V vload_bf16(const bf16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
static inline void vstore_bf16(bf16* p, V a) {
#if PM_ISA >= 4
  __m256bh h = _mm512_cvtneps_pbh(a);
  std::memcpy(p, &h, 32);
#else
  __m512i b = _mm512_castps_si512(a);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(b, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(b, _mm512_set1_epi32(0x7fff)), odd), 16);
  r = _mm512_mask_mov_epi32(r, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(r));
#endif
}
static inline W wload(const bf16* p) { return _mm512_loadu_si512(p); }
static inline W wload_first(const bf16* p, int n) { return _mm512_maskz_loadu_epi16(n >= 32 ? ~0u : (1u << n) - 1, p); }
static inline W wpair(uint32_t pair) { return _mm512_set1_epi32(int(pair)); }
static inline W wlow(W w) { return _mm512_and_si512(w, _mm512_set1_epi32(0xffff)); }  // odd elements set to zero
static inline V dot2(V acc, W a, W b) {                                               // acc + a.even*b.even + a.odd*b.odd
#if PM_ISA >= 4
  return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
#else
  const __m512i high = _mm512_set1_epi32(int(0xffff0000));
  acc = vfma(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), acc);
  return vfma(_mm512_castsi512_ps(_mm512_and_si512(a, high)), _mm512_castsi512_ps(_mm512_and_si512(b, high)), acc);
#endif
}

// I: 16 sums of int32. dot4 adds to each the products of four unsigned bytes (first) and four signed ones.
using I = __m512i;
static inline void vstore_int8(int8_t* p, V a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a))); }  // whole numbers
static inline I iset(int x) { return _mm512_set1_epi32(x); }
static inline V ifloat(I a) { return _mm512_cvtepi32_ps(a); }
static inline I bload(const uint8_t* p) { return _mm512_loadu_si512(p); }
static inline I bquad(uint32_t quad) { return _mm512_set1_epi32(int(quad)); }
static inline I from_minus_128(I a) { return _mm512_xor_si512(a, _mm512_set1_epi8(-128)); }  // signed bytes as unsigned ones 128 above
static inline I low_nibbles(I a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
static inline I high_nibbles(I a) { return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(15)); }
static inline I dot4(I acc, I weights, I inputs) {
#if PM_ISA >= 4 && defined(__AVX512VNNI__)
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(weights), "v"(inputs));  // of the intrinsic, GCC 12 keeps a loop's sums in memory
  return acc;
#else  // even and odd bytes as 16-bit numbers: the one-step byte product saturates
  const I even = _mm512_madd_epi16(_mm512_and_si512(weights, _mm512_set1_epi16(255)), _mm512_srai_epi16(_mm512_slli_epi16(inputs, 8), 8));
  return _mm512_add_epi32(acc, _mm512_add_epi32(even, _mm512_madd_epi16(_mm512_srli_epi16(weights, 8), _mm512_srai_epi16(inputs, 8))));
#endif
}

// Coded weights (weights_coded.hpp): 64 bytes of two places in a table each, then 128 low bytes -> four vectors of bf16.
using Table = __m512i;  // sixteen bytes, four times
static inline Table table_load(const uint8_t* p) { return _mm512_loadu_si512(p); }
static inline __m512i table_bytes(Table table, __m512i places) {  // of each place the lowest four bits count
#ifdef __AVX512VBMI__
  return _mm512_permutexvar_epi8(places, table);
#else
  return _mm512_shuffle_epi8(table, _mm512_and_si512(places, _mm512_set1_epi8(15)));
#endif
}
static inline void wdecode(const uint8_t* p, Table table, W (&w)[4]) {
  const __m512i places = _mm512_loadu_si512(p), low = _mm512_loadu_si512(p + 64), more = _mm512_loadu_si512(p + 128);
  const __m512i high = table_bytes(table, places), most = table_bytes(table, _mm512_srli_epi16(places, 4));
  w[0] = _mm512_unpacklo_epi8(low, high), w[1] = _mm512_unpackhi_epi8(low, high);
  w[2] = _mm512_unpacklo_epi8(more, most), w[3] = _mm512_unpackhi_epi8(more, most);
}
static inline void wstore(bf16* p, W w) { _mm512_storeu_si512(p, w); }

#elif PM_ISA == 2

struct V {
  __m256 a, b;
};
struct W {
  __m256i a, b;
};
static inline V vset(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline V vzero() { return vset(0.f); }
static inline V vload(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void vstore(float* p, V x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
static inline V vadd(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline V vsub(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline V vmul(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline V vdiv(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline V vfma(V x, V y, V z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
static inline V vinverse(V x) { return vdiv(vset(1.f), x); }
static inline V vmax(V x, V y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline float vsum(V x) {
  float t[8], s = 0;
  _mm256_storeu_ps(t, _mm256_add_ps(x.a, x.b));
  for (float v : t) s += v;
  return s;
}
static inline float vmaximum(V x) {
  float t[8], s = MINUS_INF;
  _mm256_storeu_ps(t, _mm256_max_ps(x.a, x.b));
  for (float v : t) s = v > s ? v : s;
  return s;
}
static inline V vround(V x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
static inline __m256 scale2_half(__m256 x, __m256 n) {
  return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23)));
}
static inline V vscale2(V x, V n) { return {scale2_half(x.a, n.a), scale2_half(x.b, n.b)}; }
static inline V vzero_below(V r, V x, float limit) {
  __m256 l = _mm256_set1_ps(limit);
  return {_mm256_and_ps(r.a, _mm256_cmp_ps(x.a, l, _CMP_GE_OQ)), _mm256_and_ps(r.b, _mm256_cmp_ps(x.b, l, _CMP_GE_OQ))};
}
static inline V vfirst(V x, int n, float fill) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  __m256 f = _mm256_set1_ps(fill);
  __m256 ma = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane));
  __m256 mb = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), lane));
  return {_mm256_blendv_ps(f, x.a, ma), _mm256_blendv_ps(f, x.b, mb)};
}
static inline V vload_bf16(const bf16* p) {
  __m128i lo = _mm_loadu_si128((const __m128i*)p), hi = _mm_loadu_si128((const __m128i*)(p + 8));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(lo), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(hi), 16))};
}
static inline __m256i round_half(__m256 x) {
  __m256i b = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(b, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(b, _mm256_set1_epi32(0x7fff)), odd), 16);
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), nan);
}
static inline void vstore_bf16(bf16* p, V x) {
  __m256i packed = _mm256_packus_epi32(round_half(x.a), round_half(x.b));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0xd8));
}
static inline W wload(const bf16* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 16))};
}
static inline W wload_first(const bf16* p, int n) {
  bf16 t[32] = {};
  std::memcpy(t, p, 2 * size_t(n < 32 ? n : 32));
  return wload(t);
}
static inline W wpair(uint32_t pair) { return {_mm256_set1_epi32(int(pair)), _mm256_set1_epi32(int(pair))}; }
static inline W wlow(W w) {
  const __m256i m = _mm256_set1_epi32(0xffff);
  return {_mm256_and_si256(w.a, m), _mm256_and_si256(w.b, m)};
}
static inline __m256 dot2_half(__m256 acc, __m256i a, __m256i b) {
  const __m256i high = _mm256_set1_epi32(int(0xffff0000));
  acc = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16)), acc);
  return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(a, high)), _mm256_castsi256_ps(_mm256_and_si256(b, high)), acc);
}
static inline V dot2(V acc, W a, W b) { return {dot2_half(acc.a, a.a, b.a), dot2_half(acc.b, a.b, b.b)}; }
using I = W;
static inline void vstore_int8(int8_t* p, V x) {  // whole numbers
  int32_t t[16];
  _mm256_storeu_si256((__m256i*)t, _mm256_cvtps_epi32(x.a)), _mm256_storeu_si256((__m256i*)(t + 8), _mm256_cvtps_epi32(x.b));
  for (int i = 0; i < 16; i++) p[i] = int8_t(t[i]);
}
static inline I iset(int x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
static inline V ifloat(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
static inline I bload(const uint8_t* p) { return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))}; }
static inline I bquad(uint32_t quad) { return iset(int(quad)); }
static inline I from_minus_128(I x) {
  const __m256i m = _mm256_set1_epi8(-128);
  return {_mm256_xor_si256(x.a, m), _mm256_xor_si256(x.b, m)};
}
static inline I low_nibbles(I x) {
  const __m256i m = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
static inline I high_nibbles(I x) { return low_nibbles({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)}); }
static inline __m256i dot4_half(__m256i acc, __m256i weights, __m256i inputs) {
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(weights, _mm256_set1_epi16(255)), _mm256_srai_epi16(_mm256_slli_epi16(inputs, 8), 8));
  return _mm256_add_epi32(acc, _mm256_add_epi32(even, _mm256_madd_epi16(_mm256_srli_epi16(weights, 8), _mm256_srai_epi16(inputs, 8))));
}
static inline I dot4(I acc, I weights, I inputs) { return {dot4_half(acc.a, weights.a, inputs.a), dot4_half(acc.b, weights.b, inputs.b)}; }

struct Table {
  __m256i bytes;
};
static inline Table table_load(const uint8_t* p) { return {_mm256_loadu_si256((const __m256i*)p)}; }
static inline void decode_half(const uint8_t* p, Table table, __m256i& a, __m256i& b, __m256i& c, __m256i& d) {
  const __m256i places = _mm256_loadu_si256((const __m256i*)p), low = _mm256_loadu_si256((const __m256i*)(p + 64));
  const __m256i more = _mm256_loadu_si256((const __m256i*)(p + 128)), four = _mm256_set1_epi8(15);
  const __m256i high = _mm256_shuffle_epi8(table.bytes, _mm256_and_si256(places, four));
  const __m256i most = _mm256_shuffle_epi8(table.bytes, _mm256_and_si256(_mm256_srli_epi16(places, 4), four));
  a = _mm256_unpacklo_epi8(low, high), b = _mm256_unpackhi_epi8(low, high);
  c = _mm256_unpacklo_epi8(more, most), d = _mm256_unpackhi_epi8(more, most);
}
static inline void wdecode(const uint8_t* p, Table table, W (&w)[4]) {
  decode_half(p, table, w[0].a, w[1].a, w[2].a, w[3].a);
  decode_half(p + 32, table, w[0].b, w[1].b, w[2].b, w[3].b);
}
static inline void wstore(bf16* p, W w) { _mm256_storeu_si256((__m256i*)p, w.a), _mm256_storeu_si256((__m256i*)(p + 16), w.b); }

#else

struct V {
  float v[16];
};
struct W {
  bf16 v[32];
};
#define PM_EACH(expr)                     \
  V r;                                    \
  for (int i = 0; i < 16; i++) r.v[i] = expr; \
  return r
static inline V vset(float x) { PM_EACH(x); }
static inline V vzero() { return vset(0.f); }
static inline V vload(const float* p) { PM_EACH(p[i]); }
static inline void vstore(float* p, V a) { std::memcpy(p, a.v, 64); }
static inline V vadd(V a, V b) { PM_EACH(a.v[i] + b.v[i]); }
static inline V vsub(V a, V b) { PM_EACH(a.v[i] - b.v[i]); }
static inline V vmul(V a, V b) { PM_EACH(a.v[i] * b.v[i]); }
static inline V vdiv(V a, V b) { PM_EACH(a.v[i] / b.v[i]); }
static inline V vfma(V a, V b, V c) { PM_EACH(a.v[i] * b.v[i] + c.v[i]); }
static inline V vinverse(V a) { PM_EACH(1.f / a.v[i]); }
static inline V vmax(V a, V b) { PM_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
static inline float vsum(V a) {
  float s = 0;
  for (float x : a.v) s += x;
  return s;
}
static inline float vmaximum(V a) {
  float s = MINUS_INF;
  for (float x : a.v) s = x > s ? x : s;
  return s;
}
static inline V vround(V a) { PM_EACH(std::nearbyint(a.v[i])); }
static inline V vscale2(V a, V n) { PM_EACH(std::ldexp(a.v[i], int(n.v[i]))); }
static inline V vzero_below(V a, V x, float limit) { PM_EACH(x.v[i] >= limit ? a.v[i] : 0.f); }
static inline V vfirst(V a, int n, float fill) { PM_EACH(i < n ? a.v[i] : fill); }
static inline V vload_bf16(const bf16* p) { PM_EACH(to_float(p[i])); }
static inline void vstore_bf16(bf16* p, V a) {
  for (int i = 0; i < 16; i++) p[i] = to_bf16(a.v[i]);
}
static inline W wload(const bf16* p) {
  W w;
  std::memcpy(w.v, p, 64);
  return w;
}
static inline W wload_first(const bf16* p, int n) {
  W w = {};
  std::memcpy(w.v, p, 2 * size_t(n < 32 ? n : 32));
  return w;
}
static inline W wpair(uint32_t pair) {
  W w;
  for (int i = 0; i < 16; i++) std::memcpy(w.v + 2 * i, &pair, 4);
  return w;
}
static inline W wlow(W w) {
  for (int i = 1; i < 32; i += 2) w.v[i] = 0;
  return w;
}
static inline V dot2(V acc, W a, W b) {
  PM_EACH(acc.v[i] + to_float(a.v[2 * i]) * to_float(b.v[2 * i]) + to_float(a.v[2 * i + 1]) * to_float(b.v[2 * i + 1]));
}
struct I {
  union {
    int32_t v[16];
    uint8_t b[64];
  };
};
static inline void vstore_int8(int8_t* p, V a) {  // whole numbers
  for (int i = 0; i < 16; i++) p[i] = int8_t(a.v[i]);
}
static inline I iset(int x) {
  I r;
  for (int32_t& v : r.v) v = x;
  return r;
}
static inline V ifloat(I a) { PM_EACH(float(a.v[i])); }
static inline I bload(const uint8_t* p) {
  I r;
  std::memcpy(r.b, p, 64);
  return r;
}
static inline I bquad(uint32_t quad) { return iset(int(quad)); }
static inline I from_minus_128(I a) {
  for (uint8_t& b : a.b) b ^= 128;
  return a;
}
static inline I low_nibbles(I a) {
  for (uint8_t& b : a.b) b &= 15;
  return a;
}
static inline I high_nibbles(I a) {
  for (uint8_t& b : a.b) b >>= 4;
  return a;
}
static inline I dot4(I acc, I weights, I inputs) {
  for (int i = 0; i < 64; i++) acc.v[i / 4] += int(weights.b[i]) * int(int8_t(inputs.b[i]));
  return acc;
}
struct Table {
  uint8_t bytes[16];
};
static inline Table table_load(const uint8_t* p) {
  Table t;
  std::memcpy(t.bytes, p, 16);
  return t;
}
static inline void wdecode(const uint8_t* p, Table table, W (&w)[4]) {
  for (int b = 0; b < 64; b++)
    for (int half = 0; half < 2; half++)
      w[half * 2 + b % 16 / 8].v[b / 16 * 8 + b % 8] = bf16(table.bytes[p[b] >> (4 * half) & 15] << 8 | p[64 + half * 64 + b]);
}
static inline void wstore(bf16* p, W w) { std::memcpy(p, w.v, 64); }
#undef PM_EACH

#endif

constexpr float LOG2E = 1.44269504088896341f;

static inline V vexp2(V x) {  // relative error below 3e-7; below -126 the result is 0, so a masked score (-inf) weighs nothing
  const float low = -126.f;
  const V y = vmax(x, vset(low)), n = vround(y), f = vsub(y, n);
  V p = vset(1.3276471992533978e-3f);
  p = vfma(p, f, vset(9.675541334453752e-3f));
  p = vfma(p, f, vset(5.5507132734978495e-2f));
  p = vfma(p, f, vset(2.4022119723839974e-1f));
  p = vfma(p, f, vset(6.931469670647609e-1f));
  p = vfma(p, f, vset(1.f));
  return vzero_below(vscale2(p, n), x, low);
}

static inline V vsilu(V x) { return vmul(x, vinverse(vadd(vset(1.f), vexp2(vmul(vmax(x, vset(-80.f)), vset(-LOG2E)))))); }

static inline void vstore_first(float* p, V a, int n) {  // the first n lanes
  if (n >= LANES) return vstore(p, a);
  float t[LANES];
  vstore(t, a);
  std::memcpy(p, t, sizeof(float) * size_t(n));
}

static inline constexpr int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }
