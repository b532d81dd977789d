// Instantiates the decode kernels of one element type for every head dim.
#pragma once

#include <type_traits>

#include "kernels/attention/attn_combine.cuh"
#include "kernels/attention/attn_decode_kernels.h"
#include "kernels/attention/attn_decode_split_kv.cuh"
#include "kernels/attention/attn_decode_split_kv_mma.cuh"
#include "kernels/attention/attn_dispatch.h"

namespace astrai::kernels {

// Below it, a narrow block already has all it needs under way (H200, 2026-11).
constexpr int kMinWideHeadDim = 96;

template <class T, int D, bool kWide>
DecodeKernel mma_kernel() {
  using Shape = DecodeMmaShape<D, kWide>;
  return {.config = {.function = reinterpret_cast<const void*>(
                         &attn_decode_split_kv_mma_kernel<T, D, kWide>),
                     .name = "attn_decode_split_kv_mma_kernel",
                     .threads = Shape::kThreads,
                     .shared_bytes = Shape::kSharedBytes},
          .rows = Shape::kRows,
          .block_tile_keys = Shape::kWarps * Shape::kTileKeys};
}

template <class T>
DecodeKernelSet decode_kernels(int64_t head_dim) {
  DecodeKernelSet set;
  dispatch_head_dim(head_dim, [&]<int D>() {
    using Scalar = DecodeScalarShape<D>;
    set.scalar = {
        .config = {.function = reinterpret_cast<const void*>(&attn_decode_split_kv_kernel<T, D>),
                   .name = "attn_decode_split_kv_kernel",
                   .threads = Scalar::kThreads},
        .rows = Scalar::kRows,
        .block_tile_keys = Scalar::kTileKeys};
    set.combine = {.function = reinterpret_cast<const void*>(&attn_combine_kernel<T, D>),
                   .name = "attn_combine_kernel",
                   .threads = CombineShape<D>::kThreads};
    if constexpr (!std::is_same_v<T, float>) {
      set.narrow = mma_kernel<T, D, false>();
      if constexpr (D >= kMinWideHeadDim) set.wide = mma_kernel<T, D, true>();
    }
  });
  return set;
}

}  // namespace astrai::kernels
