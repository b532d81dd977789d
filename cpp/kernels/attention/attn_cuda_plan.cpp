#include "kernels/attention/attn_cuda_plan.h"

#include <algorithm>

#include "common/check.h"

namespace astrai::kernels {
namespace {

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

int64_t floor_power_of_two(int64_t value) {
  int64_t power = 1;
  while (power * 2 <= value) power *= 2;
  return power;
}

// Keys of a split in a cluster: below, merging costs more than the shorter loop saves; above, a
// second kernel costs less than the idle half of the device, and the sooner the longer its rows
// take to load. All on an H200, 2026-11 and 2026-12.
constexpr int64_t kMinClusterSplitKeys = 64;
constexpr int64_t kMaxClusterSplitKeys = 256;
constexpr int64_t kMaxClusterSplitBytes = 128 << 10;

int64_t clusters_at_once(const DecodeDeviceFacts& device, int64_t size) {
  for (size_t i = 0; i < device.active_clusters.size(); ++i) {
    if (int64_t{1} << i == size) return device.active_clusters[i];
  }
  return 0;
}

// The largest cluster of at most max_size blocks that every unit can have at the same time, each
// block on a multiprocessor of its own.
int64_t cluster_of_unit(const DecodeDeviceFacts& device, const DecodeBatch& batch,
                        int64_t max_size) {
  int64_t best = 1;
  for (int64_t size = 2; size <= max_size && batch.num_units * size <= device.num_sms; size *= 2) {
    if (batch.num_units <= clusters_at_once(device, size)) best = size;
  }
  return best;
}

void check_facts(const DecodeDeviceFacts& device) {
  ASTRAI_CHECK_ARG(device.num_sms >= 1 && device.blocks_per_sm >= 1 && device.block_tile_keys >= 1,
                   "plan_decode: num_sms ", device.num_sms, ", blocks_per_sm ",
                   device.blocks_per_sm, ", block_tile_keys ", device.block_tile_keys,
                   "; expected numbers >= 1");
}

}  // namespace

DecodePlan plan_decode(const DecodeDeviceFacts& device, const DecodeBatch& batch,
                       int64_t max_partials) {
  check_facts(device);
  ASTRAI_CHECK_ARG(batch.num_units >= 1 && batch.kv_len >= 0 && max_partials >= 1,
                   "plan_decode: num_units ", batch.num_units, ", kv_len ", batch.kv_len,
                   ", max_partials ", max_partials, "; expected at least 1, 0 and 1");
  const int64_t slots = device.num_sms * device.blocks_per_sm;
  DecodePlan plan{.min_split_keys = 1};

  const int64_t shortest = std::min(kMinClusterSplitKeys, device.block_tile_keys);
  const int64_t clustered = cluster_of_unit(device, batch, ceil_div(batch.kv_len, shortest));
  const int64_t split_keys = ceil_div(batch.kv_len, clustered);
  if (clustered > 1 && split_keys <= kMaxClusterSplitKeys &&
      split_keys * batch.key_bytes <= kMaxClusterSplitBytes) {
    plan.num_splits = plan.cluster_size = clustered;
    plan.min_split_keys = shortest;
    return plan;
  }
  plan.min_split_keys = device.block_tile_keys;
  const int64_t long_enough = std::max<int64_t>(1, ceil_div(batch.kv_len, device.block_tile_keys));
  const int64_t filling = std::max<int64_t>(1, slots / batch.num_units);
  plan.num_splits = std::min({filling, long_enough, max_partials});
  return plan;
}

DecodePlan plan_decode_fixed(const DecodeDeviceFacts& device, const DecodeBatch& batch,
                             int64_t split_keys, int64_t max_partials) {
  check_facts(device);
  ASTRAI_CHECK_ARG(split_keys >= 1 && split_keys % device.block_tile_keys == 0,
                   "plan_decode: fixed split of ", split_keys, " keys; expected a multiple of ",
                   device.block_tile_keys);
  const int64_t needed = std::max<int64_t>(1, ceil_div(batch.max_kv_len, split_keys));
  ASTRAI_CHECK_ARG(needed <= max_partials, "plan_decode: fixed splits of ", split_keys,
                   " keys need ", needed, " partials for ", batch.max_kv_len,
                   " keys; expected at most the ", max_partials, " that there is room for");
  return {.num_splits = needed, .min_split_keys = split_keys};
}

DecodePlan plan_decode_given(const DecodeDeviceFacts& device, const DecodeBatch& batch,
                             int64_t num_splits) {
  check_facts(device);
  ASTRAI_CHECK_ARG(num_splits >= 1 && batch.num_units >= 1, "plan_decode: num_splits is ",
                   num_splits, ", num_units ", batch.num_units, "; expected at least 1 of each");
  DecodePlan plan{.num_splits = num_splits};
  if (batch.num_units * num_splits > device.num_sms) return plan;
  plan.cluster_size = floor_power_of_two(num_splits);
  while (plan.cluster_size > 1 && (num_splits % plan.cluster_size != 0 ||
                                   batch.num_units * (num_splits / plan.cluster_size) >
                                       clusters_at_once(device, plan.cluster_size))) {
    plan.cluster_size /= 2;
  }
  return plan;
}

}  // namespace astrai::kernels
