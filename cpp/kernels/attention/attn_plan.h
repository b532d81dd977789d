// How decode attention cuts the keys of a request into splits. Pure host arithmetic; the CPU and
// CUDA entry points share it.
#pragma once

#include <cstdint>

#include "kernels/attention/attn_params.h"

namespace astrai::kernels {

// Upper limit of a caller's num_splits.
constexpr int64_t kMaxSplits = 1024;

// Splits shorter than this cost more in merging than they gain in parallel work.
constexpr int64_t kMinSplitKeys = 256;

// Where the CPU stops cutting: beyond it the parts get longer, and the partials stay small.
constexpr int64_t kMaxCpuSplits = 64;

// Splits for a device that runs `parallel_units` blocks at once, where a block handles one
// (request, KV head, split): as many as fill the device, none shorter than kMinSplitKeys, at most
// max_splits. 1 when requests and heads fill the device without splitting.
//
//   1 request, 3 KV heads, 4096 keys, 132 units, 32 allowed: 132 / 3 = 44 would fill the device,
//   4096 / 256 = 16 are long enough, so 16.
//
// Throws std::invalid_argument when an argument is negative or max_splits or parallel_units is < 1.
int64_t compute_num_splits(int64_t num_requests, int64_t num_kv_heads, int64_t max_kv_len,
                           int64_t parallel_units, int64_t max_splits);

// Splits for the CPU: one for every kMinSplitKeys keys, whatever else is in the batch. With that
// the borders of a request's splits depend on its own length only, so its result does too, bit for
// bit. Throws as above.
int64_t compute_num_splits_cpu(int64_t max_kv_len, int64_t max_splits);

// Floats in the partial buffers of one launch.
constexpr int64_t o_part_floats(const AttentionParams& params) {
  return params.num_requests * params.num_q_heads * params.num_splits * params.head_dim;
}
constexpr int64_t ml_part_floats(const AttentionParams& params) {
  return params.num_requests * params.num_q_heads * params.num_splits * 2;
}

// Points params.o_part and params.ml_part at host scratch of the calling thread unless they are set
// or num_splits is 1, which needs none. The scratch grows to the largest launch, is reused by later
// ones, and stays valid until the calling thread's next launch; growth counts as a host allocation.
void alloc_split_partials(AttentionParams& params);

}  // namespace astrai::kernels
