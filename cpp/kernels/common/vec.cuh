// Device element types and small vectors of them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/dtype.h"

namespace astrai::kernels {

// The type that device code computes with for a host element type.
template <class T>
struct DeviceType_;
template <>
struct DeviceType_<float> {
  using type = float;
};
template <>
struct DeviceType_<fp16> {
  using type = __half;
};
template <>
struct DeviceType_<bf16> {
  using type = __nv_bfloat16;
};
template <class T>
using device_type = typename DeviceType_<T>::type;

__device__ inline float to_float(float value) {
  return value;
}
__device__ inline float to_float(__half value) {
  return __half2float(value);
}
__device__ inline float to_float(__nv_bfloat16 value) {
  return __bfloat162float(value);
}

template <class T>
__device__ inline T from_float(float value);
template <>
__device__ inline float from_float<float>(float value) {
  return value;
}
template <>
__device__ inline __half from_float<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

// Two floats rounded to T, the first in the low half.
template <class T>
__device__ inline uint32_t pack2(float low, float high);
template <>
__device__ inline uint32_t pack2<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ inline uint32_t pack2<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// N elements loaded or stored in one access; its address must be a multiple of its size.
template <class T, int N>
struct alignas(sizeof(T) * N) Vec {
  T lane[N];
};

// Loads N elements as floats: one access when `aligned`, N otherwise.
template <int N, class T>
__device__ inline void load_floats(const T* source, bool aligned, float (&out)[N]) {
  if (aligned) {
    const auto vec = *reinterpret_cast<const Vec<T, N>*>(source);
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = to_float(vec.lane[i]);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = to_float(source[i]);
  }
}

}  // namespace astrai::kernels
