// Device code of the cache write, shared by the plain kernel and the one that also turns the keys.
#pragma once

#include <cstdint>

#include "kernels/common/vec.cuh"
#include "kernels/kv_cache/kv_write.h"

namespace astrai::kernels {

struct KvSlot {
  int64_t page;
  int64_t offset;
  bool valid;  // false for -1, and for slots outside the cache
};

__device__ inline KvSlot kv_slot(const KvWriteParams& params, int64_t token) {
  const int64_t slot = params.slot_mapping[token];
  const int64_t page = slot / params.page_size;
  return {page, slot - page * params.page_size, slot >= 0 && page < params.num_pages};
}

// The block's threads copy elements [begin, head_dim) of each head, kVector at a time.
template <class T, int kVector>
__device__ inline void copy_heads(const T* source, int64_t source_stride, T* target,
                                  int64_t target_stride, int num_heads, int begin, int head_dim) {
  const int vectors = (head_dim - begin) / kVector;
  for (int item = static_cast<int>(threadIdx.x); item < num_heads * vectors;
       item += static_cast<int>(blockDim.x)) {
    const int head = item / vectors;
    const int at = begin + (item - head * vectors) * kVector;
    *reinterpret_cast<Vec<T, kVector>*>(target + head * target_stride + at) =
        *reinterpret_cast<const Vec<T, kVector>*>(source + head * source_stride + at);
  }
}

}  // namespace astrai::kernels
