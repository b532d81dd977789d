// What the host hands to the CUDA decode kernels.
#pragma once

#include <type_traits>

#include "kernels/attention/attn_params.h"

namespace astrai::kernels {

// Arguments of a decode kernel. Grid: x = (request, KV head, tile of its query heads), the tile
// fastest; y = split, in clusters of cluster_size along y.
struct DecodeKernelParams {
  AttentionParams attn;    // num_splits counts blocks along y
  int group_size = 1;      // query heads of a KV head
  int num_head_tiles = 1;  // parts that the group is cut into
  int cluster_size = 1;    // splits that are merged on chip before anything is stored
  int num_partials = 1;    // num_splits / cluster_size; 1 = the kernel writes the result itself
  int page_shift = -1;     // log2 of the page size when that is a power of two
  // Rows of k and v lie a token stride apart across pages too, and fit 32-bit arithmetic.
  bool linear_rows = false;
  bool vector_loads = false;  // rows of q, k and v start at multiples of the kernel's vector size
};
static_assert(std::is_trivially_copyable_v<DecodeKernelParams>);

}  // namespace astrai::kernels
