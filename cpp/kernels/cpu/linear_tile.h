// Register tiles of the linear kernel: R weight rows times M input rows, summed over K.
//
// Vector lanes run along K, so that weights are read as they are stored. Each output has one
// accumulator vector, which takes the blocks of K in order and is summed across its lanes at the
// end. That order is the same for every R and M: an output row does not depend, to the last bit, on
// how many other rows are computed with it, on the tile that it falls into, or on the threads.
#pragma once

#include <cstdint>

#include "kernels/cpu/vec.h"

namespace astrai::kernels::cpu::ASTRAI_ISA {

// K advances by two vectors at a time.
constexpr int64_t kBlock = 2 * VecF::kLanes;

// R of the tile for M input rows. With 16 vector registers no more than 9 accumulators: GCC 12
// spills them from 10 to 12 on, depending on the dtype, and 3 by 3 reaches 95 % of the peak of a
// Zen 3 core from the second-level cache. kGroupOutputs is a multiple of every R.
constexpr int kMaxTileRows = 4;
constexpr int kGroupOutputs = 12;
#if defined(__AVX512F__) || defined(__ARM_NEON)  // 32 registers
constexpr int kFullTileRows = 4;                 // of tiles while there are plenty of rows
constexpr int kTileOutputs[kMaxTileRows + 1] = {0, 6, 6, 6, 6};
#else
constexpr int kFullTileRows = 3;
constexpr int kTileOutputs[kMaxTileRows + 1] = {0, 6, 4, 3, 2};
#endif

// Stops the compiler from reading a value again from memory at each use.
inline void keep_in_register(VecF& a) {
#if defined(__x86_64__)
  asm("" : "+v"(a.v));
#elif defined(__aarch64__)
  asm("" : "+w"(a.v));
#endif
}

// One of the two vectors of a block of K, in the order in which the format is cheapest to widen:
// float32 and float16 as stored; bfloat16 its even elements and then its odd ones, a shift and a
// mask. pack_input() puts the inputs into the same order.
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
  const UInt4 raw = load_vector<UInt4>(block);
  if constexpr (Half == 0) return {reinterpret_cast<Float4>(raw << 16)};
  return {reinterpret_cast<Float4>(raw & 0xffff0000u)};
#endif
}

// sums += products over one half of a block. Keeps the operands of the shorter side in registers
// and streams the other, so that accumulators and operands fit.
template <class W, int Half, int R, int M>
inline __attribute__((always_inline)) void accumulate_half(const W* weight, int64_t weight_stride,
                                                           const float* x, int64_t x_stride,
                                                           VecF (&sums)[R * M]) {
  if constexpr (M < R) {
    VecF inputs[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      inputs[m] = vload(x + m * x_stride + Half * VecF::kLanes);
      keep_in_register(inputs[m]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      VecF weights = load_half<Half>(weight + r * weight_stride);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) sums[m * R + r] = vfma(weights, inputs[m], sums[m * R + r]);
    }
  } else {
    VecF weights[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      weights[r] = load_half<Half>(weight + r * weight_stride);
      keep_in_register(weights[r]);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      VecF inputs = vload(x + m * x_stride + Half * VecF::kLanes);
      keep_in_register(inputs);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sums[m * R + r] = vfma(weights[r], inputs, sums[m * R + r]);
    }
  }
}

// out[i] = sum of the lanes of sums[i]: halves are added until four lanes are left, and those as
// (0 + 2) + (1 + 3).
inline void reduce_four(const VecF* sums, float* out) {
#if defined(__AVX2__)
  __m128 quads[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
#if defined(__AVX512F__)
    const __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(sums[i].v), 1));
    const __m256 folded = _mm256_add_ps(_mm512_castps512_ps256(sums[i].v), upper);
#else
    const __m256 folded = sums[i].v;
#endif
    quads[i] = _mm_add_ps(_mm256_castps256_ps128(folded), _mm256_extractf128_ps(folded, 1));
  }
  _MM_TRANSPOSE4_PS(quads[0], quads[1], quads[2], quads[3]);
  _mm_storeu_ps(out, _mm_add_ps(_mm_add_ps(quads[0], quads[2]), _mm_add_ps(quads[1], quads[3])));
#else
  for (int i = 0; i < 4; ++i) out[i] = vreduce_add(sums[i]);
#endif
}

// Memory to ask for while a tile computes; bytes 0 = none. Spread evenly over the tile's blocks,
// since only so many requests can be in flight.
struct Prefetch {
  uintptr_t address = 0;
  int64_t bytes = 0;

  // The part of this that falls to one of `parts` equal ones.
  Prefetch part(int64_t index, int64_t parts) const {
    return {.address = address + static_cast<uintptr_t>(bytes / parts * index),
            .bytes = bytes / parts};
  }
};

// dots[m * R + r] = weight row r . input row m; dots has room for a multiple of four. Input rows
// are packed and padded with zeros to whole blocks; weight rows are read up to num_inputs only.
template <class W, int R, int M>
inline void dot_tile(const W* weight, int64_t weight_stride, const float* x, int64_t x_stride,
                     int64_t num_inputs, Prefetch prefetch, float* dots) {
  constexpr int kSums = R * M;
  VecF sums[kSums];
#pragma GCC unroll 32
  for (int i = 0; i < kSums; ++i) sums[i] = vzero();
  int64_t k = 0;
  const int64_t whole = num_inputs / kBlock * kBlock;
  if (prefetch.bytes != 0 && whole != 0) {
    // At most as much as the tile itself reads in a block.
    constexpr int64_t kLine = 64;
    constexpr int64_t kMaxLines = (R * kBlock * int64_t{sizeof(W)} + kLine - 1) / kLine;
    const int64_t step = prefetch.bytes / (whole / kBlock);
    uintptr_t ahead = prefetch.address;
    for (; k < whole; k += kBlock) {
#pragma GCC unroll 8
      for (int64_t line = 0; line < kMaxLines; ++line) {
        __builtin_prefetch(reinterpret_cast<const void*>(ahead + line * kLine));
      }
      ahead += step;
      accumulate_half<W, 0, R, M>(weight + k, weight_stride, x + k, x_stride, sums);
      accumulate_half<W, 1, R, M>(weight + k, weight_stride, x + k, x_stride, sums);
    }
  } else {
    for (; k < whole; k += kBlock) {
      accumulate_half<W, 0, R, M>(weight + k, weight_stride, x + k, x_stride, sums);
      accumulate_half<W, 1, R, M>(weight + k, weight_stride, x + k, x_stride, sums);
    }
  }
  if (const int64_t left = num_inputs - k; left > 0) {
    W tail[R * kBlock] = {};
    for (int r = 0; r < R; ++r) {
      for (int64_t i = 0; i < left; ++i) tail[r * kBlock + i] = weight[r * weight_stride + k + i];
    }
    accumulate_half<W, 0, R, M>(tail, kBlock, x + k, x_stride, sums);
    accumulate_half<W, 1, R, M>(tail, kBlock, x + k, x_stride, sums);
  }
#pragma GCC unroll 8
  for (int i = 0; i + 4 <= kSums; i += 4) reduce_four(sums + i, dots + i);
  if constexpr (kSums % 4 != 0) {
    constexpr int kDone = kSums / 4 * 4;
    VecF last[4] = {vzero(), vzero(), vzero(), vzero()};
    for (int i = kDone; i < kSums; ++i) last[i - kDone] = sums[i];
    reduce_four(last, dots + kDone);
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
