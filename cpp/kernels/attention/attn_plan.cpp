#include "kernels/attention/attn_plan.h"

#include <algorithm>

#include "common/check.h"
#include "common/thread_pool.h"

namespace astrai::kernels {
namespace {

// The caller of a launch holds this slot while its tasks use the lower ones.
constexpr int kPartialsScratchSlot = kNumScratchSlots - 1;

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace

int64_t compute_num_splits(int64_t num_requests, int64_t num_kv_heads, int64_t max_kv_len,
                           int64_t parallel_units, int64_t max_splits) {
  ASTRAI_CHECK_ARG(num_requests >= 0 && num_kv_heads >= 0 && max_kv_len >= 0,
                   "compute_num_splits: num_requests ", num_requests, ", num_kv_heads ",
                   num_kv_heads, ", max_kv_len ", max_kv_len, "; expected numbers >= 0");
  ASTRAI_CHECK_ARG(parallel_units >= 1 && max_splits >= 1, "compute_num_splits: parallel_units ",
                   parallel_units, ", max_splits ", max_splits, "; expected numbers >= 1");
  const int64_t blocks = num_requests * num_kv_heads;
  if (blocks == 0 || blocks >= parallel_units) return 1;
  const int64_t filling = ceil_div(parallel_units, blocks);
  const int64_t long_enough = std::max<int64_t>(1, max_kv_len / kMinSplitKeys);
  return std::min({filling, long_enough, max_splits});
}

int64_t compute_num_splits_cpu(int64_t max_kv_len, int64_t max_splits) {
  ASTRAI_CHECK_ARG(max_kv_len >= 0, "compute_num_splits_cpu: max_kv_len ", max_kv_len,
                   "; expected a number >= 0");
  ASTRAI_CHECK_ARG(max_splits >= 1, "compute_num_splits_cpu: max_splits ", max_splits,
                   "; expected a number >= 1");
  const int64_t wanted = std::max<int64_t>(1, ceil_div(max_kv_len, kMinSplitKeys));
  return std::min({wanted, kMaxCpuSplits, max_splits});
}

void alloc_split_partials(AttentionParams& params) {
  if (params.o_part != nullptr || params.num_splits <= 1) return;
  const int64_t o_floats = o_part_floats(params);
  const int64_t bytes = (o_floats + ml_part_floats(params)) * static_cast<int64_t>(sizeof(float));
  float* scratch =
      static_cast<float*>(thread_scratch(static_cast<size_t>(bytes), kPartialsScratchSlot));
  params.o_part = scratch;
  params.ml_part = scratch + o_floats;
}

}  // namespace astrai::kernels
