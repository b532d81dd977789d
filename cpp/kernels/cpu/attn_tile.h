// The two matrix products of a prefill tile, on fp32 scratch: scores = Q x K^T with K transposed on
// the way in, and O = factor * O + weights x V. Both are the same register-tiled kernel.
#pragma once

#include "kernels/cpu/attn_common.h"

namespace astrai::kernels::cpu::ASTRAI_ISA {

// Rows and vectors of one register tile: 6 x 2 accumulators, two vectors of b and one of a.
constexpr int kTileRows = 6;
constexpr int kTileVecs = 2;

// c[kTileRows, kVecs] = a[kTileRows, depth] x b[depth, kVecs], added to c * factor if there are
// factors. kLda, kLdb and kLdc are row strides.
template <int kVecs, int kLda, int kLdb, int kLdc>
inline void multiply_block(const float* a, const float* b, int depth, const float* factors,
                           float* c) {
  VecF acc[kTileRows][kVecs];
  for (int r = 0; r < kTileRows; ++r) {
    for (int j = 0; j < kVecs; ++j) {
      acc[r][j] =
          factors == nullptr ? vzero() : vload(c + r * kLdc + j * VecF::kLanes) * vset1(factors[r]);
    }
  }
  for (int p = 0; p < depth; ++p) {
    VecF col[kVecs];
    for (int j = 0; j < kVecs; ++j) col[j] = vload(b + p * kLdb + j * VecF::kLanes);
    for (int r = 0; r < kTileRows; ++r) {
      const VecF value = vset1(a[r * kLda + p]);
      for (int j = 0; j < kVecs; ++j) acc[r][j] = vfma(value, col[j], acc[r][j]);
    }
  }
  for (int r = 0; r < kTileRows; ++r) {
    for (int j = 0; j < kVecs; ++j) vstore(c + r * kLdc + j * VecF::kLanes, acc[r][j]);
  }
}

// The same for `rows` rows, a multiple of kTileRows, and kCols columns.
template <int kCols, int kLda, int kLdb, int kLdc>
void multiply(const float* a, const float* b, int rows, int depth, const float* factors, float* c) {
  constexpr int kNumVecs = kCols / VecF::kLanes;
  constexpr int kRest = kNumVecs % kTileVecs;
  static_assert(kCols % VecF::kLanes == 0);
  // Columns outside: a block of b stays in the first-level cache while all rows pass.
  for (int vec = 0; vec + kTileVecs <= kNumVecs; vec += kTileVecs) {
    for (int r = 0; r < rows; r += kTileRows) {
      multiply_block<kTileVecs, kLda, kLdb, kLdc>(a + r * kLda, b + vec * VecF::kLanes, depth,
                                                  factors == nullptr ? nullptr : factors + r,
                                                  c + r * kLdc + vec * VecF::kLanes);
    }
  }
  if constexpr (kRest != 0) {
    constexpr int kAt = (kNumVecs - kRest) * VecF::kLanes;
    for (int r = 0; r < rows; r += kTileRows) {
      multiply_block<kRest, kLda, kLdb, kLdc>(a + r * kLda, b + kAt, depth,
                                              factors == nullptr ? nullptr : factors + r,
                                              c + r * kLdc + kAt);
    }
  }
}

// Writes element i of rows[r] to out[i * stride + r], for kTransposeRows rows of one vector each.
#if defined(__AVX2__)

constexpr int kTransposeRows = 8;

inline void transpose_8x8(const __m256* rows, float* out, int stride) {
  __m256 pairs[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
  __m256 quads[8];
  for (int i = 0; i < 8; i += 4) {
    quads[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
    quads[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
    quads[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
    quads[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(out + i * stride, _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x20));
    _mm256_storeu_ps(out + (i + 4) * stride, _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x31));
  }
}

inline void transpose_rows(const VecF* rows, float* out, int stride) {
#if defined(__AVX512F__)
  __m256 half[8];
  for (int i = 0; i < 8; ++i) half[i] = _mm512_castps512_ps256(rows[i].v);
  transpose_8x8(half, out, stride);
  for (int i = 0; i < 8; ++i) half[i] = _mm512_extractf32x8_ps(rows[i].v, 1);
  transpose_8x8(half, out + 8 * stride, stride);
#else
  __m256 whole[8];
  for (int i = 0; i < 8; ++i) whole[i] = rows[i].v;
  transpose_8x8(whole, out, stride);
#endif
}

#else

constexpr int kTransposeRows = VecF::kLanes;

inline void transpose_rows(const VecF* rows, float* out, int stride) {
  for (int r = 0; r < kTransposeRows; ++r) {
    for (int i = 0; i < VecF::kLanes; ++i) out[i * stride + r] = rows[r].v[i];
  }
}

#endif

// k_transposed[D, kTileKeys] from the tile's stored rows. Columns past the count repeat the last
// key.
template <class T, int D>
void load_keys(const KeyRows<T>& rows, int64_t k_offset, float* k_transposed) {
  for (int key = 0; key < rows.count; key += kTransposeRows) {
    for (int d = 0; d < D; d += VecF::kLanes) {
      VecF block[kTransposeRows];
      for (int r = 0; r < kTransposeRows; ++r) block[r] = vload(rows.k[key + r] + k_offset + d);
      transpose_rows(block, k_transposed + d * kTileKeys + key, kTileKeys);
    }
  }
}

// v[kTileKeys, D] from the tile's stored rows: zeros for keys whose bit in `wanted` is not set.
// Returns the bits of the keys among them that hold an infinity or NaN.
template <class T, int D>
uint64_t load_values(const KeyRows<T>& rows, int64_t v_offset, uint64_t wanted, float* v) {
  uint64_t not_finite = 0;
  for (int key = 0; key < rows.count; ++key) {
    float* to = v + key * D;
    if ((wanted >> key & 1) == 0) {
      for (int d = 0; d < D; d += VecF::kLanes) vstore(to + d, vzero());
      continue;
    }
    VecF zeros = vzero();  // NaN as soon as one element is not finite
    for (int d = 0; d < D; d += VecF::kLanes) {
      const VecF value = vload(rows.v[key] + v_offset + d);
      vstore(to + d, value);
      zeros = vfma(value, vzero(), zeros);
    }
    if (vreduce_add(zeros) != 0.0f) not_finite |= uint64_t{1} << key;
  }
  return not_finite;
}

}  // namespace astrai::kernels::cpu::ASTRAI_ISA
