// What the decode kernels share: which keys a request's query sees, and which of them a split owns.
#pragma once

#include <cstdint>

#include "kernels/attention/attn_decode_params.h"
#include "kernels/attention/attn_keys.cuh"

namespace astrai::kernels {

// The block's place in the grid.
struct DecodeBlock {
  int64_t request;
  int kv_head;
  int first_head;  // query head of the block's first row
  int num_rows;    // query heads that it serves
  int split;

  __device__ DecodeBlock(const DecodeKernelParams& params, int max_rows) {
    const unsigned per_request =
        static_cast<unsigned>(params.attn.num_kv_heads) * params.num_head_tiles;
    const unsigned unit = blockIdx.x % per_request;
    request = blockIdx.x / per_request;
    kv_head = static_cast<int>(unit / params.num_head_tiles);
    const int first_row = static_cast<int>(unit % params.num_head_tiles) * max_rows;
    first_head = kv_head * params.group_size + first_row;
    num_rows = min(max_rows, params.group_size - first_row);
    split = static_cast<int>(blockIdx.y);
  }
};

// Keys that the one query of `request` sees, apart from what a mask drops.
__device__ inline KeyRange visible_keys(const AttentionParams& attn, int64_t request) {
  const int64_t kv_len = attn.page_size > 0 ? attn.kv_lens[request] : attn.kv_len;
  const int64_t position = attn.causal_mode == CausalMode::kFixed ? attn.causal_offset : kv_len - 1;
  int64_t end = min(kv_len, position + 1);
  if (attn.mask != nullptr) end = min(end, attn.mask_kv_len);
  const int64_t begin = attn.window > 0 ? max(int64_t{0}, position - attn.window + 1) : 0;
  return {static_cast<int>(begin), static_cast<int>(end)};
}

// The part of `visible` that split `split` owns. Parts are equally long, at least min_split_keys,
// and start at multiples of kTile keys, counted from the tile of the first visible key: what they
// are depends on the request's own length alone once min_split_keys decides.
template <int kTile>
__device__ inline KeyRange split_keys(const AttentionParams& attn, KeyRange visible, int split) {
  const int first_tile = visible.begin / kTile;
  const int num_tiles = max(0, (visible.end + kTile - 1) / kTile - first_tile);
  const int num_splits = static_cast<int>(attn.num_splits);
  const int min_tiles = static_cast<int>((attn.min_split_keys + kTile - 1) / kTile);
  const int tiles = max((num_tiles + num_splits - 1) / num_splits, min_tiles);
  const int64_t begin = (first_tile + static_cast<int64_t>(tiles) * split) * kTile;
  const int64_t end =
      min(begin + static_cast<int64_t>(tiles) * kTile, static_cast<int64_t>(visible.end));
  return {static_cast<int>(min(max(begin, static_cast<int64_t>(visible.begin)),
                               static_cast<int64_t>(visible.end))),
          static_cast<int>(end)};
}

__device__ inline bool mask_keeps(const AttentionParams& attn, int64_t request, int key) {
  return attn.mask == nullptr ||
         attn.mask[request * attn.mask_stride_batch + key * attn.mask_stride_kv] != 0;
}

}  // namespace astrai::kernels
