// Register tiles of the linear kernel: R weight rows times M input rows, summed over K.
//
// Vector lanes run along K, so that weights are read as they are stored. Each output has one
// accumulator vector, which takes the blocks of K in order and is summed across its lanes at the
// end. That order is the same for every R and M: an output row does not depend, to the last bit, on
// how many other rows are computed with it, on the tile that it falls into, or on the threads.
#pragma once

#include <cstdint>

#include "kernels/cpu/vec.h"
#include "kernels/cpu/vec_partial.h"

namespace astrai::kernels::cpu::ASTRAI_ISA {

// K advances by two vectors at a time.
constexpr int64_t kBlock = 2 * VecF::kLanes;

// Accumulators that fit into the vector registers beside the operands.
#if defined(__AVX512F__) || defined(__ARM_NEON)
constexpr int kMaxAccumulators = 24;  // of 32 registers
#else
constexpr int kMaxAccumulators = 12;  // of 16 registers
#endif

constexpr int kMaxTileRows = 4;  // M

// R for a given M. Eight streams of weights are about as many as hardware prefetchers follow.
constexpr int tile_outputs(int tile_rows) {
  const int fitting = kMaxAccumulators / tile_rows;
  return fitting > 8 ? 8 : fitting;
}

// The two vectors of a block of K, in the order in which the format is cheapest to widen: float32
// and float16 as stored; bfloat16 its even elements and then its odd ones, one shift and one mask
// for the two. pack_input() puts the inputs into the same order.
template <int Half>
inline VecF load_half(const float* block) {
  return vload(block + Half * VecF::kLanes);
}
template <int Half>
inline VecF load_half(const fp16* block) {
  return vload(block + Half * VecF::kLanes);
}
template <int Half>
inline VecF load_half(const bf16* block) {
#if defined(__AVX512F__)
  const __m512i raw = _mm512_loadu_si512(block);
  if constexpr (Half == 0) return {_mm512_castsi512_ps(_mm512_slli_epi32(raw, 16))};
  return {_mm512_castsi512_ps(_mm512_and_si512(raw, _mm512_set1_epi32(-0x10000)))};
#elif defined(__AVX2__)
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block));
  if constexpr (Half == 0) return {_mm256_castsi256_ps(_mm256_slli_epi32(raw, 16))};
  return {_mm256_castsi256_ps(_mm256_and_si256(raw, _mm256_set1_epi32(-0x10000)))};
#else
  typedef uint32_t UInt4 __attribute__((vector_size(16)));
  typedef uint32_t UInt4Unaligned __attribute__((vector_size(16), aligned(2), may_alias));
  const UInt4 raw = *reinterpret_cast<const UInt4Unaligned*>(block);
  if constexpr (Half == 0) return {reinterpret_cast<Float4>(raw << 16)};
  return {reinterpret_cast<Float4>(raw & 0xffff0000u)};
#endif
}

// Adds to `sums` the products over one block of K. x points at the block in each packed row.
template <class W, int R, int M>
inline __attribute__((always_inline)) void accumulate_block(const W* const (&w)[R], const float* x,
                                                            int64_t x_stride, VecF (&sums)[R][M]) {
  VecF weights[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) weights[r] = load_half<0>(w[r]);
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    const VecF value = vload(x + m * x_stride);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sums[r][m] = vfma(weights[r], value, sums[r][m]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) weights[r] = load_half<1>(w[r]);
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    const VecF value = vload(x + m * x_stride + VecF::kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sums[r][m] = vfma(weights[r], value, sums[r][m]);
  }
}

// dots[r][m] = weight row r . input row m. Input rows are packed and padded with zeros to whole
// blocks; weight rows are read up to num_inputs only.
template <class W, int R, int M>
inline void dot_tile(const W* weight, int64_t weight_stride, const float* x, int64_t x_stride,
                     int64_t num_inputs, float (&dots)[R][M]) {
  VecF sums[R][M];
  for (int r = 0; r < R; ++r) {
    for (int m = 0; m < M; ++m) sums[r][m] = vzero();
  }
  const W* rows[R];
  for (int r = 0; r < R; ++r) rows[r] = weight + r * weight_stride;
  int64_t k = 0;
  for (; k + kBlock <= num_inputs; k += kBlock) {
    const W* block[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) block[r] = rows[r] + k;
    accumulate_block<W, R, M>(block, x + k, x_stride, sums);
  }
  if (const int64_t left = num_inputs - k; left > 0) {
    W tail[R][kBlock] = {};
    const W* block[R];
    for (int r = 0; r < R; ++r) {
      for (int64_t i = 0; i < left; ++i) tail[r][i] = rows[r][k + i];
      block[r] = tail[r];
    }
    accumulate_block<W, R, M>(block, x + k, x_stride, sums);
  }
  for (int r = 0; r < R; ++r) {
    for (int m = 0; m < M; ++m) dots[r][m] = vreduce_add(sums[r][m]);
  }
}

// One row of inputs as float32 in the block order of W, padded with zeros to whole blocks.
template <class W, class X>
inline void pack_input(const X* row, int64_t num_inputs, float* packed) {
  for (int64_t k = 0; k < num_inputs; k += kBlock) {
    const int64_t left = num_inputs - k;
    X tail[kBlock] = {};
    const X* block = row + k;
    if (left < kBlock) {
      for (int64_t i = 0; i < left; ++i) tail[i] = block[i];
      block = tail;
    }
    if constexpr (dtype_of<W>::value != DType::kBFloat16 ||
                  dtype_of<X>::value == DType::kBFloat16) {
      vstore(packed + k, load_half<0>(block));
      vstore(packed + k + VecF::kLanes, load_half<1>(block));
    } else {
      for (int64_t i = 0; i < VecF::kLanes; ++i) {
        packed[k + i] = to_float(block[2 * i]);
        packed[k + VecF::kLanes + i] = to_float(block[2 * i + 1]);
      }
    }
  }
}

}  // namespace astrai::kernels::cpu::ASTRAI_ISA
