// Instantiates the prefill kernels of one element type for every head dim.
#pragma once

#include <type_traits>

#include "kernels/attention/attn_dispatch.h"
#include "kernels/attention/attn_prefill_kernels.h"
#include "kernels/attention/attn_prefill_split_q.cuh"
#include "kernels/attention/attn_prefill_split_q_mma.cuh"

namespace astrai::kernels {

template <class T, int D, PrefillShape kShape, bool kGeneral>
PrefillKernel prefill_mma_kernel() {
  using Shape = PrefillMmaShape<D, kShape>;
  return {.config = {.function = reinterpret_cast<const void*>(
                         &attn_prefill_split_q_mma_kernel<T, D, kShape, kGeneral>),
                     .name = "attn_prefill_split_q_mma_kernel",
                     .threads = Shape::kThreads,
                     .shared_bytes = Shape::kSharedBytes},
          .rows = Shape::kRows};
}

template <class T>
PrefillKernelSet prefill_kernels(int64_t head_dim, bool general) {
  PrefillKernelSet set;
  dispatch_head_dim(head_dim, [&]<int D>() {
    using Scalar = PrefillScalarShape<D>;
    set.scalar = {
        .config = {.function = reinterpret_cast<const void*>(&attn_prefill_split_q_kernel<T, D>),
                   .name = "attn_prefill_split_q_kernel",
                   .threads = Scalar::kThreads,
                   .shared_bytes = Scalar::kSharedBytes},
        .rows = Scalar::kRows};
    if constexpr (!std::is_same_v<T, float>) {
      const auto kernel = [&]<PrefillShape kShape>() {
        return general ? prefill_mma_kernel<T, D, kShape, true>()
                       : prefill_mma_kernel<T, D, kShape, false>();
      };
      set.narrow = kernel.template operator()<PrefillShape::kNarrow>();
      set.split = kernel.template operator()<PrefillShape::kSplit>();
      if constexpr (D <= kMaxWidePrefillHeadDim) {
        set.wide = kernel.template operator()<PrefillShape::kWide>();
      }
    }
  });
  return set;
}

}  // namespace astrai::kernels
