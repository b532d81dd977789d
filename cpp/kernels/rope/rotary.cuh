// Device code of rotary embedding, shared by the plain kernel and the one that also fills the
// cache.
//
// A thread turns kPairs neighbouring pairs at once: two vectors, R / 2 apart, when the halves are
// split, one vector of 2 * kPairs elements when the pairs are interleaved.
#pragma once

#include <cstdint>

#include "kernels/common/vec.cuh"
#include "kernels/rope/rotary.h"

namespace astrai::kernels {

// Pairs a thread turns at once where alignment allows: 16 bytes of each vector.
template <class T, bool kInterleaved>
constexpr int kRotaryPairs = 16 / static_cast<int>(sizeof(T)) / (kInterleaved ? 2 : 1);

template <int kPairs>
__device__ inline void load_angles(const float* source, float (&out)[kPairs]) {
  if constexpr (kPairs % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kPairs; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(source + i);
      out[i] = four.x;
      out[i + 1] = four.y;
      out[i + 2] = four.z;
      out[i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) out[i] = source[i];
  }
}

// One element each of a pair, turned. Written out, so that every kernel rounds alike.
__device__ inline float turned_first(float x, float y, float cosine, float sine) {
  return fmaf(-y, sine, __fmul_rn(x, cosine));
}
__device__ inline float turned_second(float x, float y, float cosine, float sine) {
  return fmaf(x, sine, __fmul_rn(y, cosine));
}

// Turns pairs [first, first + kPairs) of the head at `row` in place; `copy`, if not null, is a head
// elsewhere that gets the result too. A single pair may lie at any element.
template <class T, bool kInterleaved, int kPairs>
__device__ inline void turn_pairs(T* row, T* copy, const float* cos_sin, int rotary_dim,
                                  int first) {
  const int half = rotary_dim / 2;
  float cosine[kPairs], sine[kPairs];
  load_angles<kPairs>(cos_sin + first, cosine);
  load_angles<kPairs>(cos_sin + half + first, sine);
  if constexpr (kInterleaved && kPairs > 1) {
    auto vec = *reinterpret_cast<const Vec<T, 2 * kPairs>*>(row + 2 * first);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float x = to_float(vec.lane[2 * i]);
      const float y = to_float(vec.lane[2 * i + 1]);
      vec.lane[2 * i] = from_float<T>(turned_first(x, y, cosine[i], sine[i]));
      vec.lane[2 * i + 1] = from_float<T>(turned_second(x, y, cosine[i], sine[i]));
    }
    *reinterpret_cast<Vec<T, 2 * kPairs>*>(row + 2 * first) = vec;
    if (copy != nullptr) *reinterpret_cast<Vec<T, 2 * kPairs>*>(copy + 2 * first) = vec;
  } else {
    const int low_at = kInterleaved ? 2 * first : first;
    const int high_at = kInterleaved ? 2 * first + 1 : half + first;
    auto low = *reinterpret_cast<const Vec<T, kPairs>*>(row + low_at);
    auto high = *reinterpret_cast<const Vec<T, kPairs>*>(row + high_at);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float x = to_float(low.lane[i]);
      const float y = to_float(high.lane[i]);
      low.lane[i] = from_float<T>(turned_first(x, y, cosine[i], sine[i]));
      high.lane[i] = from_float<T>(turned_second(x, y, cosine[i], sine[i]));
    }
    *reinterpret_cast<Vec<T, kPairs>*>(row + low_at) = low;
    *reinterpret_cast<Vec<T, kPairs>*>(row + high_at) = high;
    if (copy != nullptr) {
      *reinterpret_cast<Vec<T, kPairs>*>(copy + low_at) = low;
      *reinterpret_cast<Vec<T, kPairs>*>(copy + high_at) = high;
    }
  }
}

__device__ inline const float* angles_of_token(const RotaryParams& params, int64_t token) {
  const int64_t position = params.positions_are_int64
                               ? static_cast<const int64_t*>(params.positions)[token]
                               : static_cast<const int32_t*>(params.positions)[token];
  return params.cos_sin + position * params.cos_sin_stride;
}

// The block's threads turn `num_heads` heads of one token, head_stride apart.
template <class T, bool kInterleaved, int kPairs>
__device__ inline void turn_heads(T* heads, int64_t head_stride, int num_heads, T* copies,
                                  int64_t copy_stride, const float* cos_sin, int rotary_dim) {
  const int vectors = rotary_dim / 2 / kPairs;
  for (int item = static_cast<int>(threadIdx.x); item < num_heads * vectors;
       item += static_cast<int>(blockDim.x)) {
    const int head = item / vectors;
    turn_pairs<T, kInterleaved, kPairs>(heads + head * head_stride,
                                        copies == nullptr ? nullptr : copies + head * copy_stride,
                                        cos_sin, rotary_dim, (item - head * vectors) * kPairs);
  }
}

}  // namespace astrai::kernels
