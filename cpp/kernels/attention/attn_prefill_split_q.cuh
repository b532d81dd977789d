// Split-Q prefill on plain CUDA cores: any element type, strides of any alignment. The readable
// baseline that the tensor-core kernel is tested against, and the kernel for fp32.
//
// One block serves a tile of kRows query rows (attn_prefill_tiles.cuh), whose keys pass through
// shared memory in tiles of kTileKeys as fp32. Eight lanes share a row: lane i of them scores keys
// i, i + 8, ... and holds vectors i, i + 8, ... of the result (a vector is four elements). Weights
// are handed around by shuffles. A key that a row does not see is neither scored for it nor added.
//
// Key tiles start at multiples of kTileKeys, so that a row's bits do not depend on its tile.
//
// Source: tiling with online softmax as in FlashAttention-2, Dao 2023, arXiv:2307.08691.
#pragma once

#include "kernels/attention/attn_prefill_tiles.cuh"
#include "kernels/common/online_softmax.cuh"
#include "kernels/common/vec.cuh"
#include "kernels/common/warp.cuh"

namespace astrai::kernels {

template <int D>
struct PrefillScalarShape {
  static constexpr int kRows = 16;
  static constexpr int kRowLanes = 8;  // lanes that share a row
  static constexpr int kThreads = kRows * kRowLanes;
  static constexpr int kTileKeys = 32;
  static constexpr int kLaneKeys = kTileKeys / kRowLanes;
  static constexpr int kVectors = D / 4;
  static constexpr int kLaneVectors = (kVectors + kRowLanes - 1) / kRowLanes;
  static constexpr int kStride =
      D + 4;  // floats of a row in shared memory: eight rows in all banks
  static constexpr int kSharedBytes = (kRows + 2 * kTileKeys) * kStride * 4;
};

// Brings a tile of keys or values to shared memory. Rows outside `keys` become zeros, unread.
template <class T, int D>
__device__ void load_scalar_tile(const PrefillKernelParams& params, const T* base,
                                 const int32_t* pages, int64_t stride_batch, int64_t stride_token,
                                 KeyRange keys, int first_key, float* shared) {
  using Shape = PrefillScalarShape<D>;
  for (int e = static_cast<int>(threadIdx.x); e < Shape::kTileKeys * Shape::kVectors;
       e += Shape::kThreads) {
    const int row = e / Shape::kVectors;
    const int at = (e - row * Shape::kVectors) * 4;
    const int key = first_key + row;
    float values[4] = {};
    if (key >= keys.begin && key < keys.end) {
      const KeyPlace place = place_key(params.attn, params.page_shift, pages, key);
      load_floats<4>(base + place.page * stride_batch + place.slot * stride_token + at,
                     params.kv_vectors, values);
    }
    *reinterpret_cast<float4*>(shared + row * Shape::kStride + at) =
        make_float4(values[0], values[1], values[2], values[3]);
  }
}

// One row's softmax and result, shared by eight lanes.
template <class T, int D>
class PrefillScalarRow {
  using Shape = PrefillScalarShape<D>;

 public:
  __device__ PrefillScalarRow(const PrefillKernelParams& params, const PrefillTile& tile)
      : params_(params),
        tile_(tile),
        row_(static_cast<int>(threadIdx.x) / Shape::kRowLanes),
        sub_(static_cast<int>(threadIdx.x) % Shape::kRowLanes) {
    if (row_ >= tile.num_rows) return;
    place_ = tile.place_row(params, row_);
    keys_ = tile.visible_keys(params, place_.token);
    mask_ = tile.mask_row(params, place_.token);
  }

  // Takes in the keys from first_key on, whose tiles are in shared memory.
  __device__ void add_tile(const float* q, const float* k, const float* v, int first_key) {
    float weights[Shape::kLaneKeys];
    const unsigned seen = score(q, k, first_key, weights);
    float highest = state_.max;
#pragma unroll
    for (int i = 0; i < Shape::kLaneKeys; ++i) highest = fmaxf(highest, weights[i]);
    highest = group_max<Shape::kRowLanes>(highest);
    const float factor = rescale(state_.max, highest);
    const float reference = finite_reference(highest);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < Shape::kLaneKeys; ++i) {
      weights[i] = exp_weight(weights[i] - reference);
      sum += weights[i];
    }
    state_ = {highest, state_.sum * factor + group_sum<Shape::kRowLanes>(sum)};
#pragma unroll
    for (int n = 0; n < Shape::kLaneVectors; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) out_[n][j] *= factor;
    }
#pragma unroll
    for (int i = 0; i < Shape::kLaneKeys; ++i) {
      for (int peer = 0; peer < Shape::kRowLanes; ++peer) {
        const int key = i * Shape::kRowLanes + peer;
        const float weight = __shfl_sync(kFullWarp, weights[i], peer, Shape::kRowLanes);
        // Zero times a value that is not finite would be NaN.
        if (((seen >> key) & 1) != 0) add_value(v + key * Shape::kStride, weight);
      }
    }
  }

  __device__ void store() const {
    if (row_ >= tile_.num_rows) return;
    const AttentionParams& attn = params_.attn;
    const SoftmaxTotal total(state_.max, state_.sum, sink_of(params_, place_.head));
    const float share = state_.empty() ? 0.0f : total.share(state_.max, state_.sum);
    T* out = static_cast<T*>(attn.out) + tile_.out_offset(params_, place_);
#pragma unroll
    for (int n = 0; n < Shape::kLaneVectors; ++n) {
      const int at = (sub_ + n * Shape::kRowLanes) * 4;
      if (at >= D) break;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        out[at + j] = from_float<T>(state_.empty() ? 0.0f : out_[n][j] / state_.sum * share);
      }
    }
    if (sub_ == 0 && attn.lse != nullptr) attn.lse[tile_.lse_offset(params_, place_)] = total.lse;
  }

 private:
  // Logits of this lane's keys, -inf where the row does not see one; returns which keys of the tile
  // it sees, the same for all lanes of the row.
  __device__ unsigned score(const float* q, const float* k, int first_key,
                            float (&logits)[Shape::kLaneKeys]) const {
    float dot[Shape::kLaneKeys] = {};
#pragma unroll 4
    for (int at = 0; at < D; at += 4) {
      const float4 a = *reinterpret_cast<const float4*>(q + row_ * Shape::kStride + at);
#pragma unroll
      for (int i = 0; i < Shape::kLaneKeys; ++i) {
        const int key = sub_ + i * Shape::kRowLanes;
        const float4 b = *reinterpret_cast<const float4*>(k + key * Shape::kStride + at);
        dot[i] += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
      }
    }
    unsigned seen = 0;
#pragma unroll
    for (int i = 0; i < Shape::kLaneKeys; ++i) {
      const int key = first_key + sub_ + i * Shape::kRowLanes;
      bool visible = key >= keys_.begin && key < keys_.end;
      if (visible && mask_ != nullptr) {
        visible = mask_[key * params_.attn.mask_stride_kv] != 0;
      }
      logits[i] = visible ? logit(params_.attn, dot[i]) : -INFINITY;
      const unsigned row_shift = static_cast<unsigned>(row_) * Shape::kRowLanes % kWarpSize;
      const unsigned row_bits = __ballot_sync(kFullWarp, visible) >> row_shift;
      seen |= (row_bits & ((1u << Shape::kRowLanes) - 1)) << (i * Shape::kRowLanes);
    }
    return seen;
  }

  __device__ void add_value(const float* value, float weight) {
#pragma unroll
    for (int n = 0; n < Shape::kLaneVectors; ++n) {
      const int at = (sub_ + n * Shape::kRowLanes) * 4;
      if (at >= D) break;
      const float4 four = *reinterpret_cast<const float4*>(value + at);
      out_[n][0] += weight * four.x;
      out_[n][1] += weight * four.y;
      out_[n][2] += weight * four.z;
      out_[n][3] += weight * four.w;
    }
  }

  const PrefillKernelParams& params_;
  const PrefillTile& tile_;
  const int row_;
  const int sub_;  // lane among those of the row
  PrefillRow place_{0, 0};
  KeyRange keys_{0, 0};
  const uint8_t* mask_ = nullptr;
  SoftmaxState state_;
  float out_[Shape::kLaneVectors][4] = {};
};

template <class T, int D>
__global__ void __launch_bounds__(PrefillScalarShape<D>::kThreads)
    attn_prefill_split_q_kernel(const __grid_constant__ PrefillKernelParams params) {
  using Shape = PrefillScalarShape<D>;
  extern __shared__ __align__(16) float shared[];
  float* const q_tile = shared;
  float* const k_tile = q_tile + Shape::kRows * Shape::kStride;
  float* const v_tile = k_tile + Shape::kTileKeys * Shape::kStride;
  allow_next_grid();
  wait_for_previous_grid();
  const AttentionParams& attn = params.attn;
  const PrefillTile tile(params, Shape::kRows);
  if (tile.num_rows == 0) return;

  for (int e = static_cast<int>(threadIdx.x); e < Shape::kRows * D; e += Shape::kThreads) {
    const int row = e / D;
    const int column = e - row * D;
    q_tile[row * Shape::kStride + column] =
        row < tile.num_rows
            ? to_float(static_cast<const T*>(
                  attn.q)[tile.q_offset(params, tile.place_row(params, row)) + column])
            : 0.0f;
  }
  const T* k = static_cast<const T*>(attn.k) + tile.kv_head * attn.k_stride_head;
  const T* v = static_cast<const T*>(attn.v) + tile.kv_head * attn.v_stride_head;
  const int32_t* pages = nullptr;
  if (attn.page_size > 0) {
    pages = attn.kv_indices + attn.kv_indptr[tile.request];
  } else {
    k += tile.request * attn.k_stride_batch;
    v += tile.request * attn.v_stride_batch;
  }
  const KeyRange keys =
      RowsKeys(params, tile, tile.visible_keys(params, tile.place_row(params, 0).token),
               tile.visible_keys(params, tile.place_row(params, tile.num_rows - 1).token))
          .any;
  PrefillScalarRow<T, D> row(params, tile);
  for (int key = keys.begin / Shape::kTileKeys * Shape::kTileKeys; key < keys.end;
       key += Shape::kTileKeys) {
    __syncthreads();  // the tile before has been used
    load_scalar_tile<T, D>(params, k, pages, attn.k_stride_batch, attn.k_stride_token, keys, key,
                           k_tile);
    load_scalar_tile<T, D>(params, v, pages, attn.v_stride_batch, attn.v_stride_token, keys, key,
                           v_tile);
    __syncthreads();
    row.add_tile(q_tile, k_tile, v_tile, key);
  }
  row.store();
}

}  // namespace astrai::kernels
