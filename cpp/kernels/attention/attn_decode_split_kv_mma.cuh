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

// Two block shapes. The narrow one leaves room for a second block on the multiprocessor, which
// keeps the memory busy while the first starts or ends; the wide one has twice the warps and finer
// tiles, for batches with no more blocks than multiprocessors, where the time is that of one block.
template <int D, bool kWide>
struct DecodeMmaShape {
  static constexpr int kRows = 16;           // query heads of a tile
  static constexpr bool kSharedQ = D > 128;  // too wide for the registers
  static constexpr int kWarps = (D > 128 ? 2 : 4) * (kWide ? 2 : 1);
  static constexpr int kTileKeys = D >= 80 || kWide ? 16 : 32;  // of one warp
  static constexpr int kStages = D > 128 ? 2 : 3;
  static constexpr int kChunks = D / 8;  // 16-byte chunks of a row
  static constexpr int kRowBytes = D * 2;
  static constexpr int kTileBytes = kTileKeys * kRowBytes;
  static constexpr int kWarpBytes = kStages * 2 * kTileBytes;
  static constexpr int kSharedBytes = kWarps * kWarpBytes;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kResultStride = D + 8;  // floats; rows of a warp's result in different banks
  static_assert(kRows * kResultStride * 4 <= kWarpBytes, "a warp's result replaces its tiles");
  static_assert(kRows * kRowBytes <= 2 * kTileBytes, "queries pass through a stage");
  static_assert((kTileKeys * kChunks) % kWarpSize == 0);
};

// One warp's pipeline and softmax state.
template <class T, int D, bool kWide>
class DecodeMmaWarp {
  using Shape = DecodeMmaShape<D, kWide>;
  static constexpr int kTileKeys = Shape::kTileKeys;
  static constexpr int kKeyTiles = kTileKeys / 8;    // n8 tiles of the scores
  static constexpr int kAhead = Shape::kStages - 1;  // tile loads under way
  static constexpr unsigned kAllKeys = kTileKeys == 32 ? kFullWarp : (1u << kTileKeys) - 1;

 public:
  __device__ DecodeMmaWarp(const DecodeKernelParams& params, const DecodeBlock& block,
                           uint32_t shared, unsigned* tile_bits, uint32_t* q_shared)
      : params_(params),
        attn_(params.attn),
        request_(block.request),
        shared_(shared),
        tile_bits_(tile_bits),
        lane_(static_cast<int>(threadIdx.x) % kWarpSize),
        both_halves_(block.num_rows > 8),
        q_shared_(q_shared) {
    q_ = static_cast<const T*>(attn_.q) + request_ * attn_.q_stride_batch +
         block.first_head * attn_.q_stride_head;
    k_ = static_cast<const T*>(attn_.k) + block.kv_head * attn_.k_stride_head;
    v_ = static_cast<const T*>(attn_.v) + block.kv_head * attn_.v_stride_head;
    if (attn_.page_size > 0) {
      pages_ = attn_.kv_indices + attn_.kv_indptr[request_];
    } else {
      k_ += request_ * attn_.k_stride_batch;
      v_ += request_ * attn_.v_stride_batch;
    }
  }

  // Starts the way of the queries to the registers, through the stage that is filled last. Needs
  // nothing of the request's length, so it comes first.
  __device__ void start_q(const DecodeBlock& block) {
    if constexpr (!Shape::kSharedQ) {
      if (params_.vector_loads) {
        constexpr int kChunks = Shape::kChunks;
        for (int index = lane_; index < Shape::kRows * kChunks; index += kWarpSize) {
          const int row = index / kChunks;
          const int chunk = index % kChunks;
          const bool used = row < block.num_rows;
          cp_async_16(tile_address(kAhead) + row * Shape::kRowBytes +
                          swizzled_chunk<kChunks>(row, chunk) * 16,
                      q_ + (used ? row : 0) * attn_.q_stride_head + chunk * 8, used);
        }
      }
      cp_async_commit();
    }
  }

  // Works through the block's keys. Every warp calls it, whether it gets tiles or not.
  __device__ void run(const DecodeBlock& block, KeyRange keys) {
    keys_ = keys;
    first_tile_ = keys.begin / kTileKeys + static_cast<int>(threadIdx.x) / kWarpSize;
    const int end_tile = (keys.end + kTileKeys - 1) / kTileKeys;
    if (keys.end > keys.begin) {
      num_tiles_ = max(0, (end_tile - first_tile_ + Shape::kWarps - 1) / Shape::kWarps);
    }
    KeyRef refs[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) refs[i] = resolve(i);
    KeyRef next = resolve(kAhead);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (i < num_tiles_) load(i, refs[i]);
      cp_async_commit();
    }
    finish_q(block);
    if (num_tiles_ <= kAhead) {
      // Fewer tiles than stages: all of them are on their way, nothing is left to load.
      for (int tile = 0; tile < num_tiles_; ++tile) {
        if (tile + 1 < kAhead) {
          cp_async_wait<1>();
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

  // Leaves the warp's rows, not normalised, at `values` [num_rows, kResultStride] in shared memory
  // (its own tiles' place) and its states at `states`.
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
        *reinterpret_cast<float2*>(values + r * Shape::kResultStride + n * 8 + column) =
            make_float2(out_[n][half * 2], out_[n][half * 2 + 1]);
      }
    }
  }

 private:
  // The key that this lane resolves in a tile: lane i has key i.
  struct KeyRef {
    int page = 0;
    int slot = 0;
    bool valid = false;
  };

  __device__ KeyRef resolve(int index) const {
    const int key = (first_tile_ + index * Shape::kWarps) * kTileKeys + lane_;
    KeyRef ref;
    ref.valid = index < num_tiles_ && lane_ < kTileKeys && key >= keys_.begin && key < keys_.end &&
                mask_keeps(attn_, request_, key);
    if (ref.valid) {
      const KeyPlace place = place_key(attn_, params_.page_shift, pages_, key);
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
    const unsigned bits = __ballot_sync(kFullWarp, ref.valid);
    if (lane_ == 0) tile_bits_[stage] = bits;
    if (params_.linear_rows) {
      if (bits == kAllKeys) {
        load_rows<true, true>(stage, ref, bits);
      } else {
        load_rows<true, false>(stage, ref, bits);
      }
    } else {
      load_rows<false, false>(stage, ref, bits);
    }
  }

  // kLinear: row r of the pool is r token strides from its start, whatever its page.
  template <bool kLinear, bool kFull>
  __device__ void load_rows(int stage, const KeyRef& ref, unsigned bits) {
    constexpr int kChunks = Shape::kChunks;
    const uint32_t k_tile = tile_address(stage);
    const uint32_t k_row_bytes = static_cast<uint32_t>(attn_.k_stride_token) * 2;
    const uint32_t v_row_bytes = static_cast<uint32_t>(attn_.v_stride_token) * 2;
    const int own_row =
        kLinear ? ref.page * static_cast<int>(attn_.page_size) + ref.slot : ref.slot;
#pragma unroll
    for (int i = 0; i < kTileKeys * kChunks / kWarpSize; ++i) {
      const int index = i * kWarpSize + lane_;
      const int row = index / kChunks;
      const int chunk = index % kChunks;
      const uint32_t target =
          k_tile + row * Shape::kRowBytes + swizzled_chunk<kChunks>(row, chunk) * 16;
      const int slot = __shfl_sync(kFullWarp, own_row, row);
      const unsigned char* k = reinterpret_cast<const unsigned char*>(k_) + chunk * 16;
      const unsigned char* v = reinterpret_cast<const unsigned char*>(v_) + chunk * 16;
      if constexpr (kLinear) {
        k += static_cast<uint64_t>(static_cast<uint32_t>(slot)) * k_row_bytes;
        v += static_cast<uint64_t>(static_cast<uint32_t>(slot)) * v_row_bytes;
      } else {
        const int64_t page = __shfl_sync(kFullWarp, ref.page, row);
        k += (page * attn_.k_stride_batch + slot * attn_.k_stride_token) * 2;
        v += (page * attn_.v_stride_batch + slot * attn_.v_stride_token) * 2;
      }
      if constexpr (kFull) {
        cp_async_16(target, k);
        cp_async_16(target + Shape::kTileBytes, v);
      } else {
        cp_async_16(target, k, (bits >> row) & 1);
        cp_async_16(target + Shape::kTileBytes, v, (bits >> row) & 1);
      }
    }
  }

  // Two query elements of a row as one register; rows past the group are zeros.
  __device__ uint32_t q_pair(const DecodeBlock& block, int row, int column) const {
    if (row >= block.num_rows) return 0;
    const T* pair = q_ + row * attn_.q_stride_head + column;
    const Vec<T, 2> two{pair[0], pair[1]};
    return *reinterpret_cast<const uint32_t*>(&two);
  }

  // Ends what start_q began: the query fragments are in place after it.
  __device__ void finish_q(const DecodeBlock& block) {
    if constexpr (Shape::kSharedQ) {
      constexpr int kPairs = Shape::kRows * D / 2;
      for (int e = static_cast<int>(threadIdx.x); e < kPairs; e += Shape::kThreads) {
        const int row = e / (D / 2);
        const int pair = e % (D / 2);
        const int chunk = swizzled_chunk<Shape::kChunks>(row, pair / 4);
        q_shared_[row * (D / 2) + chunk * 4 + pair % 4] = q_pair(block, row, pair * 2);
      }
      __syncthreads();
    } else if (params_.vector_loads) {
      cp_async_wait<kAhead>();  // all but the tiles
      __syncwarp();
      const int row = (lane_ & 7) + ((lane_ >> 3) & 1) * 8;
#pragma unroll
      for (int step = 0; step < D / 16; ++step) {
        const int chunk = swizzled_chunk<Shape::kChunks>(row, step * 2 + (lane_ >> 4));
        ldmatrix_x4(q_fragments_[step], tile_address(kAhead) + row * Shape::kRowBytes + chunk * 16);
      }
      __syncwarp();
    } else {
#pragma unroll
      for (int step = 0; step < D / 16; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          q_fragments_[step][i] =
              q_pair(block, lane_ / 4 + (i & 1) * 8, step * 16 + (i / 2) * 8 + (lane_ % 4) * 2);
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
      for (int i = 0; i < 4; ++i) fragment[i] = q_fragments_[step][i];
    }
  }

  // scores[n] = logits of the tile's keys; -inf for keys that are not seen.
  __device__ void score(int stage, float (&scores)[kKeyTiles][4]) {
    const uint32_t k_tile = tile_address(stage);
    const int matrix_row = (lane_ & 7) + ((lane_ >> 4) & 1) * 8;
    const int matrix_chunk = (lane_ >> 3) & 1;
    // Two sums, over even and odd steps, halve the chain of dependent matrix instructions.
    float sums[2][kKeyTiles][4] = {};
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
        mma_m16n8k16<T>(sums[step % 2][n], query, b[0], b[1]);
        mma_m16n8k16<T>(sums[step % 2][n + 1], query, b[2], b[3]);
      }
    }
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] = sums[0][n][i] + sums[1][n][i];
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

  const DecodeKernelParams& params_;
  const AttentionParams& attn_;
  const int64_t request_;
  const uint32_t shared_;
  unsigned* const tile_bits_;  // [kStages]: which keys of a stage's tile are seen
  const int lane_;
  const bool both_halves_;  // rows 8 .. 15 are used
  const T* q_;              // the block's first query head
  const T* k_;
  const T* v_;
  const int32_t* pages_ = nullptr;  // of the request; null when dense
  KeyRange keys_{0, 0};
  int first_tile_ = 0;
  int num_tiles_ = 0;
  uint32_t* const q_shared_;  // [kRows, D / 2] pairs, swizzled, of the whole block; for kSharedQ
  uint32_t q_fragments_[Shape::kSharedQ ? 1 : D / 16][4];
  float out_[D / 8][4] = {};
  SoftmaxState state_[2];  // of rows lane / 4 and lane / 4 + 8; sums are this lane's columns only
};

template <class T, int D, bool kWide>
__global__ void __launch_bounds__(DecodeMmaShape<D, kWide>::kThreads)
    attn_decode_split_kv_mma_kernel(const __grid_constant__ DecodeKernelParams params) {
  using Shape = DecodeMmaShape<D, kWide>;
  extern __shared__ __align__(128) unsigned char shared_tiles[];
  __shared__ unsigned tile_bits[Shape::kWarps][Shape::kStages];
  __shared__ SoftmaxState states[Shape::kWarps][Shape::kRows];
  __shared__ SoftmaxState merged[Shape::kRows];
  __shared__ alignas(16) uint32_t shared_q[Shape::kSharedQ ? Shape::kRows * D / 2 : 4];

  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const DecodeBlock block(params, Shape::kRows);
  unsigned char* tiles = shared_tiles + warp * Shape::kWarpBytes;
  allow_next_grid();
  wait_for_previous_grid();
  DecodeMmaWarp<T, D, kWide> work(params, block, shared_address(tiles), tile_bits[warp], shared_q);
  work.start_q(block);
  work.run(block, split_keys<Shape::kTileKeys>(
                      params.attn, visible_keys(params.attn, block.request), block.split));
  work.store(block, reinterpret_cast<float*>(tiles), states[warp]);
  finish_split<T, D, Shape::kRows, Shape::kWarps, Shape::kResultStride>(
      params, block, reinterpret_cast<float*>(shared_tiles), Shape::kWarpBytes / 4, states, merged);
}

}  // namespace astrai::kernels
