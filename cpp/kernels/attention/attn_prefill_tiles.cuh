// The flat list of query tiles, and what the rows of one see.
//
// A tile is up to `tile_rows` rows of one request and KV head. A row is a pair (token, query head
// of the group), the head fastest, so that a tile meets each key once for all heads that share it
// and any group size fills it. A batch's tiles form one list, whatever its requests' lengths. The
// list is ordered by distance from the request's end: all last tiles, which see the most keys when
// causal, then all tiles before those. The longest blocks thus start first, and what is left over
// at the end is short. Blocks past the end of the list, which the host can only bound, return.
#pragma once

#include <cstdint>

#include "kernels/attention/attn_keys.cuh"
#include "kernels/attention/attn_prefill_params.h"
#include "kernels/common/warp.cuh"

namespace astrai::kernels {

// Tiles of a request of a ragged batch.
__device__ inline int ragged_tiles(const PrefillKernelParams& params, int tile_rows, int request) {
  const int32_t* indptr = params.attn.qo_indptr + request;
  const int rows = (indptr[1] - indptr[0]) * params.group_size;
  return (rows + tile_rows - 1) / tile_rows;
}

struct TilePlace {
  int request;  // -1: past the end of the list
  int tile;     // within the request
};

// Place of the list's entry `index` in a ragged batch. Level l of the list holds each request's
// l-th tile from the end. All lanes of a warp call it together.
__device__ inline TilePlace find_ragged_tile(const PrefillKernelParams& params, int tile_rows,
                                             int index) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int num_requests = static_cast<int>(params.attn.num_requests);
  const int first = lane < num_requests ? ragged_tiles(params, tile_rows, lane) : 0;
  // Tiles on levels below `level`.
  const auto tiles_below = [&](int level) {
    int count = min(first, level);
    for (int b = lane + kWarpSize; b < num_requests; b += kWarpSize) {
      count += min(ragged_tiles(params, tile_rows, b), level);
    }
    return static_cast<int>(__reduce_add_sync(kFullWarp, static_cast<unsigned>(count)));
  };
  const int64_t all_rows = params.attn.num_q_rows * params.group_size;
  int low = 0;  // tiles_below(low) <= index < tiles_below(high)
  int high = static_cast<int>((all_rows + tile_rows - 1) / tile_rows);
  if (tiles_below(high) <= index) return {-1, 0};
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    if (tiles_below(middle) <= index) {
      low = middle;
    } else {
      high = middle;
    }
  }
  int rank = index - tiles_below(low);  // among the requests with more than `low` tiles
  for (int chunk = 0; chunk < num_requests; chunk += kWarpSize) {
    const int b = chunk + lane;
    const int tiles = b < num_requests ? ragged_tiles(params, tile_rows, b) : 0;
    unsigned there = __ballot_sync(kFullWarp, tiles > low);
    if (rank >= __popc(there)) {
      rank -= __popc(there);
      continue;
    }
    for (; rank > 0; --rank) there &= there - 1;
    const int owner = __ffs(static_cast<int>(there)) - 1;
    return {chunk + owner, __shfl_sync(kFullWarp, tiles, owner) - 1 - low};
  }
  return {-1, 0};
}

struct PrefillRow {
  int token;  // within the request
  int head;   // query head
};

// The block's rows and their request.
struct PrefillTile {
  int64_t request;
  int kv_head;
  int64_t q_begin;   // the request's first token in q when ragged, else 0
  int first_row;     // of the tile, among the request's rows
  int num_rows;      // 0: nothing to do
  int64_t position;  // of token 0 on the key axis
  int kv_len;
  bool causal;

  PrefillTile() = default;  // for shared memory

  // All lanes of a warp call it.
  __device__ PrefillTile(const PrefillKernelParams& params, int tile_rows)
      : request(0), q_begin(0), num_rows(0) {
    const AttentionParams& attn = params.attn;
    const unsigned heads = static_cast<unsigned>(attn.num_kv_heads);
    const int index = static_cast<int>(blockIdx.x / heads);
    kv_head = static_cast<int>(blockIdx.x % heads);
    int64_t q_len = attn.q_len;
    int tile;
    if (attn.qo_indptr != nullptr) {
      const TilePlace place = find_ragged_tile(params, tile_rows, index);
      if (place.request < 0) return;
      request = place.request;
      tile = place.tile;
      q_begin = attn.qo_indptr[request];
      q_len = attn.qo_indptr[request + 1] - q_begin;
    } else {
      const int requests = static_cast<int>(attn.num_requests);
      const int rows = static_cast<int>(q_len) * params.group_size;
      request = index % requests;
      tile = (rows + tile_rows - 1) / tile_rows - 1 - index / requests;
    }
    first_row = tile * tile_rows;
    num_rows = min(tile_rows, static_cast<int>(q_len) * params.group_size - first_row);
    kv_len = static_cast<int>(attn.page_size > 0 ? attn.kv_lens[request] : attn.kv_len);
    int64_t offset = kNotCausal;
    if (attn.causal_mode == CausalMode::kFixed) offset = attn.causal_offset;
    if (attn.causal_mode == CausalMode::kPerRequest) offset = attn.causal_offsets[request];
    causal = offset != kNotCausal || attn.causal_mode == CausalMode::kFromLengths;
    position = offset != kNotCausal ? offset : kv_len - q_len;
  }

  // Token and query head of a row.
  __device__ PrefillRow place_row(const PrefillKernelParams& params, int row) const {
    const int token = (first_row + row) / params.group_size;
    const int member = first_row + row - token * params.group_size;
    return {token, kv_head * params.group_size + member};
  }

  // Keys that a token's rows see, apart from what a mask drops; begin <= end.
  __device__ KeyRange visible_keys(const PrefillKernelParams& params, int token) const {
    const AttentionParams& attn = params.attn;
    const int64_t at = position + token;
    int64_t end = kv_len;
    if (causal) end = min(end, at + 1);
    if (attn.mask != nullptr) end = token < attn.mask_q_len ? min(end, attn.mask_kv_len) : 0;
    end = max(end, int64_t{0});
    int64_t begin = attn.window > 0 ? max(int64_t{0}, at - attn.window + 1) : 0;
    begin = min(begin, end);
    return {static_cast<int>(begin), static_cast<int>(end)};
  }

  // The mask's row of a token; null without a mask.
  __device__ const uint8_t* mask_row(const PrefillKernelParams& params, int token) const {
    const AttentionParams& attn = params.attn;
    if (attn.mask == nullptr) return nullptr;
    return attn.mask + request * attn.mask_stride_batch + token * attn.mask_stride_q;
  }

  // Where a row lies in q, out and lse.
  __device__ int64_t q_offset(const PrefillKernelParams& params, PrefillRow row) const {
    const AttentionParams& attn = params.attn;
    return request * attn.q_stride_batch + (q_begin + row.token) * attn.q_stride_token +
           row.head * attn.q_stride_head;
  }
  __device__ int64_t out_offset(const PrefillKernelParams& params, PrefillRow row) const {
    const AttentionParams& attn = params.attn;
    return request * attn.out_stride_batch + (q_begin + row.token) * attn.out_stride_token +
           row.head * attn.out_stride_head;
  }
  __device__ int64_t lse_offset(const PrefillKernelParams& params, PrefillRow row) const {
    const AttentionParams& attn = params.attn;
    return request * attn.lse_stride_batch + (q_begin + row.token) * attn.lse_stride_token +
           row.head * attn.lse_stride_head;
  }
};

// A head's further logit, -inf for none.
__device__ inline float sink_of(const PrefillKernelParams& params, int head) {
  return params.attn.sinks == nullptr ? -INFINITY : params.attn.sinks[head];
}

// What a run of rows sees: keys that some row may see, and keys that every row sees. Both ends of a
// row's range rise with the row, except that a mask with fewer rows than the batch ends the last
// ones at 0.
struct RowsKeys {
  KeyRange any;
  KeyRange all;

  // From what the first and the last row see.
  __device__ RowsKeys(const PrefillKernelParams& params, const PrefillTile& tile, KeyRange first,
                      KeyRange last)
      : any{min(first.begin, last.begin), max(first.end, last.end)},
        all{max(first.begin, last.begin), min(first.end, last.end)} {
    if (params.attn.mask == nullptr) return;
    all = {0, 0};
    if (last.end == 0) any.end = tile.kv_len;  // rows between may see more than both ends
  }
};

}  // namespace astrai::kernels
