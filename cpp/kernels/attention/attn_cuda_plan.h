// How decode attention on CUDA cuts a batch into blocks. Pure host arithmetic over numbers that do
// not change from step to step, so that a captured graph holds for other lengths too.
#pragma once

#include <array>
#include <cstdint>

namespace astrai::kernels {

// What the plan needs to know of the device and of the kernel that will run on it.
struct DecodeDeviceFacts {
  int64_t num_sms = 1;
  int64_t blocks_per_sm = 1;     // of this kernel, resident at once
  int64_t block_tile_keys = 64;  // keys that one block loads in one round of its warps
  // Clusters of 2^i blocks, which can merge on chip, that fit the device at once; 0 = none.
  std::array<int64_t, 5> active_clusters{};
};

struct DecodeBatch {
  int64_t num_units = 1;   // requests x KV heads x tiles of a KV head's query heads
  int64_t kv_len = 0;      // keys of a typical request, from bounds known on the host
  int64_t max_kv_len = 0;  // keys of the longest request that the buffers can hold
  int64_t key_bytes = 0;   // of one key and its value, of one KV head
};

struct DecodePlan {
  int64_t num_splits = 1;      // blocks for a unit
  int64_t cluster_size = 1;    // consecutive splits that are merged on chip; divides num_splits
  int64_t min_split_keys = 1;  // no split but the last of a request is shorter

  // Results of a row that reach memory; with 1 the decode kernel writes the final one.
  int64_t num_partials() const { return num_splits / cluster_size; }
};

// Splits for the fastest batch. Short requests that leave the device half empty are split into one
// cluster each, whose blocks merge on chip: no second kernel. Otherwise as many splits as fill the
// device once, each with at least one round of keys, merged by the combine kernel; blocks of one
// cluster must be placed together, and a device full of clusters runs at two thirds of its speed
// (H200, 2026-11). Never more than max_partials results a row.
//
//   132 SMs with 2 blocks each, room for 16 clusters of 8 blocks, 64 keys a round:
//   1 request, 8 KV heads, 512 keys: 8 splits of 64 keys in one cluster
//   1 request, 8 KV heads, 100000 keys: 264 / 8 = 33 splits fill it
//   64 requests, 8 KV heads: 512 units fill it, so 1
DecodePlan plan_decode(const DecodeDeviceFacts& device, const DecodeBatch& batch,
                       int64_t max_partials);

// Splits of exactly `split_keys` keys (a multiple of block_tile_keys), as many as the longest
// request can have, never in clusters. Which keys are summed in which order then depends on the
// request's own length alone: its result is the same bits in any batch on the same kind of device.
// Throws std::invalid_argument when split_keys is no multiple of the tile or max_partials are too
// few.
DecodePlan plan_decode_fixed(const DecodeDeviceFacts& device, const DecodeBatch& batch,
                             int64_t split_keys, int64_t max_partials);

// A number of splits that the caller chose, in the largest clusters that divide it while all blocks
// have a multiprocessor each.
DecodePlan plan_decode_given(const DecodeDeviceFacts& device, const DecodeBatch& batch,
                             int64_t num_splits);

}  // namespace astrai::kernels
