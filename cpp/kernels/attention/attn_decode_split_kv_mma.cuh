// Split-KV decode on tensor cores, for 16-bit elements (compute capability 8.0 and later).
//
// One block serves up to 16 query heads of one KV head of one request over one split of its keys:
// the heads are the M rows of the m16n8k16 tiles, so any group size works. Each warp takes every
// kWarps-th tile of kTileKeys keys and runs a pipeline of its own: kStages slots of K and V tiles
// in shared memory, kStages - 1 tile loads under way (cp.async) while one is computed, and no
// barrier between warps until their results are merged. A tile's page addresses are resolved once,
// one lane a key, and passed on by shuffles; page ids are read one tile ahead of the loads that
// need them.
//
// Keys that the row does not see are zero-filled without reading them, so nothing they hold (NaN,
// wild page ids) can reach a result.
//
// Preconditions: rows of k and v start at multiples of 16 bytes.
// Source: flash decoding (split KV), online softmax of Milakov and Gimelshein 2018.
#pragma once

#include "kernels/attention/attn_combine.cuh"
#include "kernels/attention/attn_decode_rows.cuh"
#include "kernels/common/cp_async.cuh"
#include "kernels/common/mma.cuh"
#include "kernels/common/online_softmax.cuh"
#include "kernels/common/vec.cuh"
#include "kernels/common/warp.cuh"

namespace astrai::kernels {

template <int D>
struct DecodeMmaShape {
  static constexpr int kRows = 16;           // query heads of a tile
  static constexpr bool kSharedQ = D > 128;  // too wide for the registers
  static constexpr int kWarps = D > 128 ? 2 : 4;
  static constexpr int kTileKeys = D >= 80 ? 16 : 32;  // of one warp
  static constexpr int kStages = D > 128 ? 2 : 3;
  static constexpr int kChunks = D / 8;  // 16-byte chunks of a row
  static constexpr int kRowBytes = D * 2;
  static constexpr int kTileBytes = kTileKeys * kRowBytes;
  static constexpr int kWarpBytes = kStages * 2 * kTileBytes;
  static constexpr int kSharedBytes = kWarps * kWarpBytes;
  static constexpr int kThreads = kWarps * kWarpSize;
  static_assert(kRows * D * 4 <= kWarpBytes, "a warp's result replaces its tiles");
  static_assert((kTileKeys * kChunks) % kWarpSize == 0);
};

// One warp's pipeline and softmax state.
template <class T, int D>
class DecodeMmaWarp {
  using Shape = DecodeMmaShape<D>;
  static constexpr int kTileKeys = Shape::kTileKeys;
  static constexpr int kKeyTiles = kTileKeys / 8;  // n8 tiles of the scores
  static constexpr unsigned kAllKeys = kTileKeys == 32 ? kFullWarp : (1u << kTileKeys) - 1;

 public:
  __device__ DecodeMmaWarp(const DecodeKernelParams& params, const DecodeBlock& block,
                           KeyRange keys, uint32_t shared, unsigned* tile_bits, uint32_t* q_shared)
      : attn_(params.attn),
        request_(block.request),
        keys_(keys),
        shared_(shared),
        tile_bits_(tile_bits),
        lane_(static_cast<int>(threadIdx.x) % kWarpSize),
        both_halves_(block.num_rows > 8),
        q_shared_(q_shared) {
    k_ = static_cast<const T*>(attn_.k) + block.kv_head * attn_.k_stride_head;
    v_ = static_cast<const T*>(attn_.v) + block.kv_head * attn_.v_stride_head;
    pages_ = attn_.page_size > 0 ? attn_.kv_indices + attn_.kv_indptr[request_] : nullptr;
    first_tile_ = keys.begin / kTileKeys + static_cast<int>(threadIdx.x) / kWarpSize;
    const int end_tile = (keys.end + kTileKeys - 1) / kTileKeys;
    num_tiles_ = keys.end > keys.begin
                     ? max(0, (end_tile - first_tile_ + Shape::kWarps - 1) / Shape::kWarps)
                     : 0;
  }

  // Every warp of the block calls it, whether it has tiles or not.
  __device__ void run(const DecodeKernelParams& params, const DecodeBlock& block) {
    constexpr int kAhead = Shape::kStages - 1;
    KeyRef refs[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) refs[i] = resolve(i);
    KeyRef next = resolve(kAhead);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (i < num_tiles_) load(i, refs[i]);
      cp_async_commit();
    }
    load_q(params, block);
    if (num_tiles_ <= kAhead) {
      // Fewer tiles than stages: all of them are on their way, nothing is left to load.
      for (int tile = 0; tile < num_tiles_; ++tile) {
        if (tile == 0) {
          cp_async_wait<kAhead - 1>();
        } else {
          cp_async_wait<0>();
        }
        __syncwarp();
        compute(tile);
      }
      return;
    }
    int load_stage = kAhead;
    int stage = 0;
    for (int tile = 0; tile < num_tiles_; ++tile) {
      // The slot was read in the last iteration, by this warp alone.
      if (tile + kAhead < num_tiles_) load(load_stage, next);
      cp_async_commit();
      next = resolve(tile + kAhead + 1);
      cp_async_wait<kAhead>();
      __syncwarp();
      compute(stage);
      __syncwarp();
      load_stage = load_stage + 1 == Shape::kStages ? 0 : load_stage + 1;
      stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
    }
  }

  // Leaves the warp's rows, not normalised, at `values` [num_rows, D] in shared memory (its own
  // tiles' place) and its states at `states`.
  __device__ void store(const DecodeBlock& block, float* values, SoftmaxState* states) {
    __syncwarp();
    const int row = lane_ / 4;
    const int column = (lane_ % 4) * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = group_sum<4>(state_[half].sum);
      const int r = row + half * 8;
      if (r >= block.num_rows) continue;
      if (column == 0) states[r] = {state_[half].max, sum};
      if (num_tiles_ == 0) continue;
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
        *reinterpret_cast<float2*>(values + r * D + n * 8 + column) =
            make_float2(out_[n][half * 2], out_[n][half * 2 + 1]);
      }
    }
  }

 private:
  // The key that this lane resolves in a tile: lane i has key i.
  struct KeyRef {
    int64_t page = 0;
    int slot = 0;
    bool valid = false;
  };

  __device__ KeyRef resolve(int index) const {
    const int key = (first_tile_ + index * Shape::kWarps) * kTileKeys + lane_;
    KeyRef ref;
    ref.valid = index < num_tiles_ && lane_ < kTileKeys && key >= keys_.begin && key < keys_.end &&
                mask_keeps(attn_, request_, key);
    if (ref.valid) {
      const KeyPlace place = place_key(attn_, request_, pages_, key);
      ref.page = place.page;
      ref.slot = place.slot;
    }
    return ref;
  }

  __device__ uint32_t tile_address(int stage) const {
    return shared_ + stage * (2 * Shape::kTileBytes);
  }

  // Starts the loads of a tile into a stage.
  __device__ void load(int stage, const KeyRef& ref) {
    constexpr int kChunks = Shape::kChunks;
    const unsigned bits = __ballot_sync(kFullWarp, ref.valid);
    if (lane_ == 0) tile_bits_[stage] = bits;
    const int64_t k_row = ref.page * attn_.k_stride_batch + ref.slot * attn_.k_stride_token;
    const int64_t v_row = ref.page * attn_.v_stride_batch + ref.slot * attn_.v_stride_token;
    const uint32_t k_tile = tile_address(stage);
    const uint32_t v_tile = k_tile + Shape::kTileBytes;
    uint32_t destination[kTileKeys * kChunks / kWarpSize];
#pragma unroll
    for (int i = 0; i < kTileKeys * kChunks / kWarpSize; ++i) {
      const int index = i * kWarpSize + lane_;
      const int row = index / kChunks;
      const int chunk = index % kChunks;
      destination[i] = row * Shape::kRowBytes + swizzled_chunk<kChunks>(row, chunk) * 16;
      const int64_t offset = __shfl_sync(kFullWarp, k_row, row) + chunk * 8;
      cp_async_16(k_tile + destination[i], k_ + offset, (bits >> row) & 1);
    }
#pragma unroll
    for (int i = 0; i < kTileKeys * kChunks / kWarpSize; ++i) {
      const int index = i * kWarpSize + lane_;
      const int row = index / kChunks;
      const int chunk = index % kChunks;
      const int64_t offset = __shfl_sync(kFullWarp, v_row, row) + chunk * 8;
      cp_async_16(v_tile + destination[i], v_ + offset, (bits >> row) & 1);
    }
  }

  // Two query elements of a row as one register; rows past the group are zeros.
  __device__ uint32_t q_pair(const DecodeKernelParams& params, const DecodeBlock& block, int row,
                             int column) const {
    if (row >= block.num_rows) return 0;
    const T* pair = static_cast<const T*>(attn_.q) + request_ * attn_.q_stride_batch +
                    (block.first_head + row) * attn_.q_stride_head + column;
    if (params.vector_loads) return *reinterpret_cast<const uint32_t*>(pair);
    const Vec<T, 2> two{pair[0], pair[1]};
    return *reinterpret_cast<const uint32_t*>(&two);
  }

  __device__ void load_q(const DecodeKernelParams& params, const DecodeBlock& block) {
    if constexpr (Shape::kSharedQ) {
      constexpr int kPairs = Shape::kRows * D / 2;
      for (int e = static_cast<int>(threadIdx.x); e < kPairs; e += Shape::kThreads) {
        const int row = e / (D / 2);
        const int pair = e % (D / 2);
        const int chunk = swizzled_chunk<Shape::kChunks>(row, pair / 4);
        q_shared_[row * (D / 2) + chunk * 4 + pair % 4] = q_pair(params, block, row, pair * 2);
      }
      __syncthreads();
    } else {
#pragma unroll
      for (int step = 0; step < D / 16; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          q_[step][i] = q_pair(params, block, lane_ / 4 + (i & 1) * 8,
                               step * 16 + (i / 2) * 8 + (lane_ % 4) * 2);
        }
      }
    }
  }

  // The A fragment of 16 columns of the queries.
  __device__ void q_fragment(int step, uint32_t (&fragment)[4]) const {
    if constexpr (Shape::kSharedQ) {
      const int row = (lane_ & 7) + ((lane_ >> 3) & 1) * 8;
      const int chunk = swizzled_chunk<Shape::kChunks>(row, step * 2 + (lane_ >> 4));
      ldmatrix_x4(fragment, shared_address(q_shared_) + row * Shape::kRowBytes + chunk * 16);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) fragment[i] = q_[step][i];
    }
  }

  // scores[n] = logits of the tile's keys; -inf for keys that are not seen.
  __device__ void score(int stage, float (&scores)[kKeyTiles][4]) {
    const uint32_t k_tile = tile_address(stage);
    const int matrix_row = (lane_ & 7) + ((lane_ >> 4) & 1) * 8;
    const int matrix_chunk = (lane_ >> 3) & 1;
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] = 0.0f;
    }
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      uint32_t query[4];
      q_fragment(step, query);
#pragma unroll
      for (int n = 0; n < kKeyTiles; n += 2) {
        const int row = n * 8 + matrix_row;
        const int chunk = swizzled_chunk<Shape::kChunks>(row, step * 2 + matrix_chunk);
        uint32_t b[4];
        ldmatrix_x4(b, k_tile + row * Shape::kRowBytes + chunk * 16);
        mma_m16n8k16<T>(scores[n], query, b[0], b[1]);
        mma_m16n8k16<T>(scores[n + 1], query, b[2], b[3]);
      }
    }
    if (attn_.softcap > 0.0f) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[n][i] = logit(attn_, scores[n][i]);
      }
    } else {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[n][i] *= attn_.scale;
      }
    }
    const unsigned bits = tile_bits_[stage];
    if (bits != kAllKeys) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = n * 8 + (lane_ % 4) * 2 + (i & 1);
          if (((bits >> key) & 1) == 0) scores[n][i] = -INFINITY;
        }
      }
    }
  }

  // Turns scores into weights against the new maximum and rescales what was summed before.
  __device__ void update_softmax(float (&scores)[kKeyTiles][4]) {
    float factor[2] = {1.0f, 1.0f};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half == 1 && !both_halves_) {
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) scores[n][2] = scores[n][3] = 0.0f;
        break;
      }
      float highest = state_[half].max;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        highest = fmaxf(highest, fmaxf(scores[n][half * 2], scores[n][half * 2 + 1]));
      }
      highest = group_max<4>(highest);
      factor[half] = rescale(state_[half].max, highest);
      const float reference = finite_reference(highest);
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& weight = scores[n][half * 2 + i];
          weight = exp_weight(weight - reference);
          sum += weight;
        }
      }
      state_[half] = {highest, state_[half].sum * factor[half] + sum};
    }
    if (__any_sync(kFullWarp, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
        out_[n][0] *= factor[0];
        out_[n][1] *= factor[0];
        out_[n][2] *= factor[1];
        out_[n][3] *= factor[1];
      }
    }
  }

  __device__ void compute(int stage) {
    float scores[kKeyTiles][4];
    score(stage, scores);
    update_softmax(scores);
    const uint32_t v_tile = tile_address(stage) + Shape::kTileBytes;
    const int matrix_row = (lane_ & 7) + ((lane_ >> 3) & 1) * 8;
    const int matrix_chunk = (lane_ >> 4) & 1;
#pragma unroll
    for (int half_tile = 0; half_tile < kTileKeys / 16; ++half_tile) {
      const float(&low)[4] = scores[half_tile * 2];
      const float(&high)[4] = scores[half_tile * 2 + 1];
      const uint32_t weights[4] = {pack2<T>(low[0], low[1]), pack2<T>(low[2], low[3]),
                                   pack2<T>(high[0], high[1]), pack2<T>(high[2], high[3])};
      const int row = half_tile * 16 + matrix_row;
#pragma unroll
      for (int n = 0; n < D / 8; n += 2) {
        const int chunk = swizzled_chunk<Shape::kChunks>(row, n + matrix_chunk);
        uint32_t b[4];
        ldmatrix_x4_trans(b, v_tile + row * Shape::kRowBytes + chunk * 16);
        mma_m16n8k16<T>(out_[n], weights, b[0], b[1]);
        mma_m16n8k16<T>(out_[n + 1], weights, b[2], b[3]);
      }
    }
  }

  const AttentionParams& attn_;
  const int64_t request_;
  const KeyRange keys_;
  const uint32_t shared_;
  unsigned* const tile_bits_;  // [kStages]: which keys of a stage's tile are seen
  const int lane_;
  const bool both_halves_;  // rows 8 .. 15 are used
  const T* k_;
  const T* v_;
  const int32_t* pages_;
  int first_tile_;
  int num_tiles_;
  uint32_t* const q_shared_;  // [kRows, D / 2] pairs, swizzled, of the whole block; for kSharedQ
  uint32_t q_[Shape::kSharedQ ? 1 : D / 16][4];
  float out_[D / 8][4] = {};
  SoftmaxState state_[2];  // of rows lane / 4 and lane / 4 + 8; sums are this lane's columns only
};

template <class T, int D>
__global__ void __launch_bounds__(DecodeMmaShape<D>::kThreads)
    attn_decode_split_kv_mma_kernel(const __grid_constant__ DecodeKernelParams params) {
  using Shape = DecodeMmaShape<D>;
  extern __shared__ __align__(128) unsigned char shared_tiles[];
  __shared__ unsigned tile_bits[Shape::kWarps][Shape::kStages];
  __shared__ SoftmaxState states[Shape::kWarps][Shape::kRows];
  __shared__ SoftmaxState merged[Shape::kRows];
  __shared__ alignas(16) uint32_t shared_q[Shape::kSharedQ ? Shape::kRows * D / 2 : 4];

  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const DecodeBlock block(params, Shape::kRows);
  allow_next_grid();
  wait_for_previous_grid();
  const KeyRange keys = split_keys<Shape::kTileKeys>(
      params.attn, visible_keys(params.attn, block.request), block.split);
  unsigned char* tiles = shared_tiles + warp * Shape::kWarpBytes;
  DecodeMmaWarp<T, D> work(params, block, keys, shared_address(tiles), tile_bits[warp], shared_q);
  work.run(params, block);
  work.store(block, reinterpret_cast<float*>(tiles), states[warp]);
  finish_split<T, D, Shape::kRows, Shape::kWarps>(
      params, block, reinterpret_cast<float*>(shared_tiles), Shape::kWarpBytes / 4, states, merged);
}

}  // namespace astrai::kernels
