// When rows of new keys and values and of the cache can be copied in 16-byte vectors. Host code of
// the CUDA launchers.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "kernels/kv_cache/kv_write.h"

namespace astrai::kernels {

inline bool kv_rows_aligned(const KvWriteParams& params) {
  const int64_t elements = 16 / dtype_bytes(params.dtype);
  const auto aligned = [](const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
  };
  const auto steps = [&](auto... strides) { return ((strides % elements == 0) && ...); };
  return params.head_dim % elements == 0 && aligned(params.k) && aligned(params.v) &&
         aligned(params.k_pages) && aligned(params.v_pages) &&
         steps(params.k_stride_token, params.k_stride_head, params.v_stride_token,
               params.v_stride_head, params.k_pages_stride_page, params.k_pages_stride_token,
               params.k_pages_stride_head, params.v_pages_stride_page, params.v_pages_stride_token,
               params.v_pages_stride_head);
}

}  // namespace astrai::kernels
