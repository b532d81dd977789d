// What the host hands to the CUDA prefill kernels.
#pragma once

#include <type_traits>

#include "kernels/attention/attn_params.h"

namespace astrai::kernels {

// Arguments of a prefill kernel. Grid: x = (tile of the flat list, KV head), the head fastest; as
// many tiles as the batch can have by what the host knows, see attn_prefill_tiles.cuh.
struct PrefillKernelParams {
  AttentionParams attn;
  int group_size = 1;       // query heads of a KV head
  float scale_log2 = 0.0f;  // from a product q.k to an exponent of two, where there is no softcap
  int page_shift = -1;      // log2 of the page size when that is a power of two
  // Rows start at multiples of the kernel's vector size: 16 bytes, or 4 elements where it is
  // scalar.
  bool q_vectors = false;
  bool kv_vectors = false;
  bool out_vectors = false;
};
static_assert(std::is_trivially_copyable_v<PrefillKernelParams>);

}  // namespace astrai::kernels
