// When rotary rows can be turned in 16-byte vectors. Host code of the CUDA launchers.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "kernels/rope/rotary.h"

namespace astrai::kernels {

inline bool is_multiple(const void* pointer, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(bytes) == 0;
}

// True when heads of q, k and the table can be read 16 bytes at a time.
inline bool rotary_rows_aligned(const RotaryParams& params) {
  const int64_t elements = 16 / dtype_bytes(params.dtype);
  const int64_t unit = params.interleaved ? params.rotary_dim : params.rotary_dim / 2;
  return unit % elements == 0 && (params.rotary_dim / 2) % 4 == 0 && is_multiple(params.q, 16) &&
         params.q_stride_token % elements == 0 && params.q_stride_head % elements == 0 &&
         (params.k == nullptr ||
          (is_multiple(params.k, 16) && params.k_stride_token % elements == 0 &&
           params.k_stride_head % elements == 0)) &&
         is_multiple(params.cos_sin, 16) && params.cos_sin_stride % 4 == 0;
}

// Threads of a block whose longest loop has `items` items.
inline int threads_for(int64_t items) {
  constexpr int64_t kMaxThreads = 256;
  const int64_t rounded = (items + 31) / 32 * 32;
  return static_cast<int>(rounded < 32 ? 32 : rounded > kMaxThreads ? kMaxThreads : rounded);
}

}  // namespace astrai::kernels
