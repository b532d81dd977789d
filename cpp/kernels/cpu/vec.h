// One vector of floats, as wide as the instruction set that this source is compiled for.
//
// Everything lives in a namespace named after the set, so that the linker can never mix code of two
// sets. For the same reason the per-set sources use no inline functions or templates of the
// standard library beyond those the compiler always folds away.
#pragma once

#include <cstdint>

#include "common/dtype.h"

#if defined(__AVX512F__) && defined(__AVX512BF16__)
#define ASTRAI_ISA avx512
#define ASTRAI_ISA_NAME "avx512"
#include <immintrin.h>
#elif defined(__AVX2__)
#define ASTRAI_ISA avx2
#define ASTRAI_ISA_NAME "avx2"
#include <immintrin.h>
#else
#define ASTRAI_ISA baseline
#if defined(__ARM_NEON)
#define ASTRAI_ISA_NAME "neon"
#else
#define ASTRAI_ISA_NAME "baseline"
#endif
#endif

namespace astrai::kernels::cpu::ASTRAI_ISA {

#if defined(__AVX512F__) && defined(__AVX512BF16__)

struct VecF {
  static constexpr int kLanes = 16;
  __m512 v;
};

inline VecF vset1(float x) {
  return {_mm512_set1_ps(x)};
}
inline VecF vload(const float* p) {
  return {_mm512_loadu_ps(p)};
}
inline VecF vload(const bf16* p) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
}
inline VecF vload(const fp16* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void vstore(float* p, VecF a) {
  _mm512_storeu_ps(p, a.v);
}
inline void vstore(bf16* p, VecF a) {
  // Not vcvtneps2bf16: that flushes subnormals, and results must not depend on the set.
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(lsb, _mm512_set1_epi32(0x7fff)));
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  const __m512i result = _mm512_mask_mov_epi32(rounded, nan, quiet);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtepi32_epi16(_mm512_srli_epi32(result, 16)));
}
inline void vstore(fp16* p, VecF a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline VecF operator+(VecF a, VecF b) {
  return {_mm512_add_ps(a.v, b.v)};
}
inline VecF operator-(VecF a, VecF b) {
  return {_mm512_sub_ps(a.v, b.v)};
}
inline VecF operator*(VecF a, VecF b) {
  return {_mm512_mul_ps(a.v, b.v)};
}
inline VecF operator/(VecF a, VecF b) {
  return {_mm512_div_ps(a.v, b.v)};
}
inline VecF vfma(VecF a, VecF b, VecF c) {
  return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}
inline VecF vmax(VecF a, VecF b) {
  return {_mm512_max_ps(a.v, b.v)};
}
inline VecF vmin(VecF a, VecF b) {
  return {_mm512_min_ps(a.v, b.v)};
}
inline float vreduce_add(VecF a) {
  return _mm512_reduce_add_ps(a.v);
}
inline float vreduce_max(VecF a) {
  return _mm512_reduce_max_ps(a.v);
}
inline VecF vround(VecF a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// a * 2^n for a whole-numbered n in [-126, 127].
inline VecF vscale_by_pow2(VecF a, VecF n) {
  const __m512i exponent =
      _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23);
  return {_mm512_mul_ps(a.v, _mm512_castsi512_ps(exponent))};
}
// Lane by lane: a < b ? x : y.
inline VecF vselect_lt(VecF a, VecF b, VecF x, VecF y) {
  return {_mm512_mask_mov_ps(y.v, _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), x.v)};
}

#elif defined(__AVX2__)

struct VecF {
  static constexpr int kLanes = 8;
  __m256 v;
};

inline VecF vset1(float x) {
  return {_mm256_set1_ps(x)};
}
inline VecF vload(const float* p) {
  return {_mm256_loadu_ps(p)};
}
inline VecF vload(const bf16* p) {
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16))};
}
inline VecF vload(const fp16* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline void vstore(float* p, VecF a) {
  _mm256_storeu_ps(p, a.v);
}
inline void vstore(bf16* p, VecF a) {
  const __m256i bits = _mm256_castps_si256(a.v);
  const __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
  const __m256i result = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  const __m128i packed =
      _mm_packus_epi32(_mm256_castsi256_si128(result), _mm256_extracti128_si256(result, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}
inline void vstore(fp16* p, VecF a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline VecF operator+(VecF a, VecF b) {
  return {_mm256_add_ps(a.v, b.v)};
}
inline VecF operator-(VecF a, VecF b) {
  return {_mm256_sub_ps(a.v, b.v)};
}
inline VecF operator*(VecF a, VecF b) {
  return {_mm256_mul_ps(a.v, b.v)};
}
inline VecF operator/(VecF a, VecF b) {
  return {_mm256_div_ps(a.v, b.v)};
}
inline VecF vfma(VecF a, VecF b, VecF c) {
  return {_mm256_fmadd_ps(a.v, b.v, c.v)};
}
inline VecF vmax(VecF a, VecF b) {
  return {_mm256_max_ps(a.v, b.v)};
}
inline VecF vmin(VecF a, VecF b) {
  return {_mm256_min_ps(a.v, b.v)};
}
inline float vreduce_add(VecF a) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}
inline float vreduce_max(VecF a) {
  __m128 top = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  top = _mm_max_ps(top, _mm_movehl_ps(top, top));
  return _mm_cvtss_f32(_mm_max_ss(top, _mm_movehdup_ps(top)));
}
inline VecF vround(VecF a) {
  return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline VecF vscale_by_pow2(VecF a, VecF n) {
  const __m256i exponent =
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127)), 23);
  return {_mm256_mul_ps(a.v, _mm256_castsi256_ps(exponent))};
}
inline VecF vselect_lt(VecF a, VecF b, VecF x, VecF y) {
  return {_mm256_blendv_ps(y.v, x.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
}

#else  // generic vectors: SSE2 on x86-64, NEON on Arm

typedef float Float4 __attribute__((vector_size(16)));
typedef int32_t Int4 __attribute__((vector_size(16)));
typedef uint32_t UInt4 __attribute__((vector_size(16)));
typedef uint16_t UShort4 __attribute__((vector_size(8)));

struct VecF {
  static constexpr int kLanes = 4;
  Float4 v;
};

inline VecF vset1(float x) {
  return {Float4{x, x, x, x}};
}
// Memory of any type and alignment as a vector. Not through a pointer to an unaligned, may_alias
// vector type: GCC 13 loses the may_alias and moves such a load before the stores it depends on.
template <class V>
inline V load_vector(const void* p) {
  V value;
  __builtin_memcpy(&value, p, sizeof(V));
  return value;
}
template <class V>
inline void store_vector(void* p, V value) {
  __builtin_memcpy(p, &value, sizeof(V));
}
inline VecF vload(const float* p) {
  return {load_vector<Float4>(p)};
}
inline UInt4 load_halves(const void* p) {
  return __builtin_convertvector(load_vector<UShort4>(p), UInt4);
}
inline VecF vload(const bf16* p) {
  return {reinterpret_cast<Float4>(load_halves(p) << 16)};
}
inline VecF vload(const fp16* p) {
  const UInt4 bits = load_halves(p);
  const UInt4 magnitude = (bits & 0x7fffu) << 13;
  // The exponent's bias goes from 15 to 127; infinity and NaN need the same step once more.
  const UInt4 special = reinterpret_cast<UInt4>(magnitude >= 0x0f800000u) & 0x38000000u;
  const UInt4 normal = magnitude + 0x38000000u + special;
  // A subnormal m * 2^-24 is (1 + m / 1024) * 2^-14 less 2^-14, without a subnormal operand.
  const Float4 small = reinterpret_cast<Float4>(magnitude + 0x38800000u) - 0x1p-14f;
  const UInt4 is_small = reinterpret_cast<UInt4>(magnitude < 0x00800000u);
  const UInt4 value = (is_small & reinterpret_cast<UInt4>(small)) | (~is_small & normal);
  return {reinterpret_cast<Float4>(value | ((bits & 0x8000u) << 16))};
}
inline void vstore(float* p, VecF a) {
  store_vector(p, a.v);
}
inline void vstore(bf16* p, VecF a) {
  const UInt4 bits = reinterpret_cast<UInt4>(a.v);
  const UInt4 rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const UInt4 nan = reinterpret_cast<UInt4>(a.v != a.v);
  const UInt4 value = (nan & (bits | 0x400000u)) | (~nan & rounded);
  store_vector(p, __builtin_convertvector(value >> 16, UShort4));
}
inline void vstore(fp16* p, VecF a) {
  for (int i = 0; i < 4; ++i) p[i] = from_float<fp16>(a.v[i]);
}
inline VecF operator+(VecF a, VecF b) {
  return {a.v + b.v};
}
inline VecF operator-(VecF a, VecF b) {
  return {a.v - b.v};
}
inline VecF operator*(VecF a, VecF b) {
  return {a.v * b.v};
}
inline VecF operator/(VecF a, VecF b) {
  return {a.v / b.v};
}
inline VecF vfma(VecF a, VecF b, VecF c) {
  return {a.v * b.v + c.v};
}
inline VecF vselect_lt(VecF a, VecF b, VecF x, VecF y) {
  const Int4 less = a.v < b.v;
  return {reinterpret_cast<Float4>((less & reinterpret_cast<Int4>(x.v)) |
                                   (~less & reinterpret_cast<Int4>(y.v)))};
}
inline VecF vmax(VecF a, VecF b) {
  return vselect_lt(b, a, a, b);
}
inline VecF vmin(VecF a, VecF b) {
  return vselect_lt(a, b, a, b);
}
inline float vreduce_add(VecF a) {
  return (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]);
}
inline float vreduce_max(VecF a) {
  const float low = a.v[0] > a.v[2] ? a.v[0] : a.v[2];
  const float high = a.v[1] > a.v[3] ? a.v[1] : a.v[3];
  return low > high ? low : high;
}
inline VecF vround(VecF a) {
  // 1.5 * 2^23: adding and subtracting it rounds any |a| < 2^22 to the nearest even whole number.
  const VecF magic = vset1(12582912.0f);
  return (a + magic) - magic;
}
inline VecF vscale_by_pow2(VecF a, VecF n) {
  const Int4 exponent = (__builtin_convertvector(n.v, Int4) + 127) << 23;
  return {a.v * reinterpret_cast<Float4>(exponent)};
}

#endif

inline VecF vzero() {
  return vset1(0.0f);
}

// exp(x), within 2 units in the last place; x below -87.3 (and -infinity) gives 0, x above 88.3 is
// clamped, NaN stays NaN. Range reduction by ln 2 in two parts (Cody and Waite 1980), then
// 1 + r + r^2 p(r) on [-ln2/2, ln2/2] with p of degree 4 fitted for least relative error (4e-9).
inline VecF vexp(VecF x) {
  const VecF floor = vset1(-87.3f);
  // The operand order matters: both return their second operand when x is NaN.
  const VecF clamped = vmin(vset1(88.3f), vmax(floor, x));
  const VecF n = vround(clamped * vset1(1.44269504088896341f));
  VecF r = vfma(n, vset1(-0.693145751953125f), clamped);
  r = vfma(n, vset1(-1.42860682030941723e-6f), r);
  VecF poly = vset1(0.001381454f);
  poly = vfma(poly, r, vset1(0.008368745f));
  poly = vfma(poly, r, vset1(0.04166839f));
  poly = vfma(poly, r, vset1(0.16666521f));
  poly = vfma(poly, r, vset1(0.49999994f));
  // The big terms last, so that roundings do not pile up where there is no fused multiply-add.
  poly = vfma(poly, r * r, r) + vset1(1.0f);
  return vselect_lt(x, floor, vzero(), vscale_by_pow2(poly, n));
}

}  // namespace astrai::kernels::cpu::ASTRAI_ISA
