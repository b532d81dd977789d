// Split-KV decode on plain CUDA cores: any element type, strides of any alignment. The readable
// baseline that the tensor-core kernel is tested against, and the kernel for fp32.
//
// One block serves up to kRows query heads of one KV head of one request over one split of its
// keys. Eight lanes share a key, so a warp scores four keys at once and the block sixteen; each
// group of eight lanes keeps a softmax state of its own, and lane i of it holds vectors i, i + 8,
// ... of the row (a vector is four elements). The states are merged at the end. Keys that the row
// does not see are not read.
//
// Source: flash decoding (split KV), online softmax of Milakov and Gimelshein 2018.
#pragma once

#include "kernels/attention/attn_combine.cuh"
#include "kernels/attention/attn_decode_rows.cuh"
#include "kernels/common/online_softmax.cuh"
#include "kernels/common/vec.cuh"
#include "kernels/common/warp.cuh"

namespace astrai::kernels {

template <int D>
struct DecodeScalarShape {
  static constexpr int kRows = D > 128 ? 2 : 4;  // what the accumulators leave registers for
  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kKeyLanes = 8;                      // lanes that share a key
  static constexpr int kWarpKeys = kWarpSize / kKeyLanes;  // keys that a warp scores at once
  static constexpr int kTileKeys = kWarps * kWarpKeys;
  static constexpr int kVectors = D / 4;
  static constexpr int kLaneVectors = (kVectors + kKeyLanes - 1) / kKeyLanes;
};

// Online softmax and values of kRows heads over the keys of one group of lanes.
template <class T, int D>
struct DecodeScalarGroup {
  using Shape = DecodeScalarShape<D>;
  SoftmaxState state[Shape::kRows];
  float out[Shape::kRows][Shape::kLaneVectors][4] = {};

  // Takes in one key whose logits are `logits`; -inf where the row does not see it.
  __device__ void add(const float (&logits)[Shape::kRows],
                      const float (&value)[Shape::kLaneVectors][4]) {
#pragma unroll
    for (int r = 0; r < Shape::kRows; ++r) {
      const float highest = fmaxf(state[r].max, logits[r]);
      const float factor = rescale(state[r].max, highest);
      const float weight = exp_weight(logits[r] - finite_reference(highest));
      state[r] = {highest, state[r].sum * factor + weight};
#pragma unroll
      for (int i = 0; i < Shape::kLaneVectors; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) out[r][i][j] = out[r][i][j] * factor + weight * value[i][j];
      }
    }
  }

  // Merges with the group `step` lanes away.
  __device__ void merge(int step) {
#pragma unroll
    for (int r = 0; r < Shape::kRows; ++r) {
      const float other_max = __shfl_xor_sync(kFullWarp, state[r].max, step);
      const float other_sum = __shfl_xor_sync(kFullWarp, state[r].sum, step);
      const float highest = fmaxf(state[r].max, other_max);
      const float factor = rescale(state[r].max, highest);
      const float other_factor = rescale(other_max, highest);
      state[r] = {highest, state[r].sum * factor + other_sum * other_factor};
#pragma unroll
      for (int i = 0; i < Shape::kLaneVectors; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float other = __shfl_xor_sync(kFullWarp, out[r][i][j], step);
          out[r][i][j] = out[r][i][j] * factor + other * other_factor;
        }
      }
    }
  }
};

template <class T, int D>
__global__ void __launch_bounds__(DecodeScalarShape<D>::kThreads)
    attn_decode_split_kv_kernel(const __grid_constant__ DecodeKernelParams params) {
  using Shape = DecodeScalarShape<D>;
  constexpr int kRows = Shape::kRows;
  __shared__ alignas(16) float shared_q[kRows][D];
  __shared__ alignas(16) float values[Shape::kWarps][kRows][D];
  __shared__ SoftmaxState states[Shape::kWarps][kRows];
  __shared__ SoftmaxState merged[kRows];

  const AttentionParams& attn = params.attn;
  const DecodeBlock block(params, kRows);
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int sub = lane % Shape::kKeyLanes;
  allow_next_grid();
  wait_for_previous_grid();

  const T* q = static_cast<const T*>(attn.q) + block.request * attn.q_stride_batch;
  for (int e = static_cast<int>(threadIdx.x); e < kRows * D; e += Shape::kThreads) {
    const int row = e / D;
    shared_q[row][e - row * D] =
        row < block.num_rows
            ? to_float(q[(block.first_head + row) * attn.q_stride_head + (e - row * D)])
            : 0.0f;
  }
  __syncthreads();

  const T* k = static_cast<const T*>(attn.k) + block.kv_head * attn.k_stride_head;
  const T* v = static_cast<const T*>(attn.v) + block.kv_head * attn.v_stride_head;
  const int32_t* pages = nullptr;
  if (attn.page_size > 0) {
    pages = attn.kv_indices + attn.kv_indptr[block.request];
  } else {
    k += block.request * attn.k_stride_batch;
    v += block.request * attn.v_stride_batch;
  }
  const KeyRange keys =
      split_keys<Shape::kTileKeys>(attn, visible_keys(attn, block.request), block.split);
  DecodeScalarGroup<T, D> group;
  const int first = keys.begin + warp * Shape::kWarpKeys + lane / Shape::kKeyLanes;
  // Every lane runs every iteration, since the lanes of a warp exchange sums.
  for (int base = keys.begin + warp * Shape::kWarpKeys; base < keys.end; base += Shape::kTileKeys) {
    const int key = first + (base - (keys.begin + warp * Shape::kWarpKeys));
    const bool seen = key < keys.end && mask_keeps(attn, block.request, key);
    float dot[kRows] = {};
    float value[Shape::kLaneVectors][4] = {};
    if (seen) {
      const KeyPlace place = place_key(attn, params.page_shift, pages, key);
      const T* k_row =
          k + int64_t{place.page} * attn.k_stride_batch + place.slot * attn.k_stride_token;
      const T* v_row =
          v + int64_t{place.page} * attn.v_stride_batch + place.slot * attn.v_stride_token;
#pragma unroll
      for (int i = 0; i < Shape::kLaneVectors; ++i) {
        const int at = (sub + i * Shape::kKeyLanes) * 4;
        if (at >= D) break;
        float element[4];
        load_floats<4>(k_row + at, params.vector_loads, element);
        load_floats<4>(v_row + at, params.vector_loads, value[i]);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float4 query = *reinterpret_cast<const float4*>(&shared_q[r][at]);
          dot[r] += query.x * element[0] + query.y * element[1] + query.z * element[2] +
                    query.w * element[3];
        }
      }
    }
    float logits[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float product = group_sum<Shape::kKeyLanes>(dot[r]);
      logits[r] = seen ? logit(attn, product) : -INFINITY;
    }
    group.add(logits, value);
  }
#pragma unroll
  for (int step = Shape::kKeyLanes; step < kWarpSize; step *= 2) group.merge(step);

  if (lane < Shape::kKeyLanes) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (sub == 0) states[warp][r] = group.state[r];
#pragma unroll
      for (int i = 0; i < Shape::kLaneVectors; ++i) {
        const int at = (sub + i * Shape::kKeyLanes) * 4;
        if (at >= D) break;
        *reinterpret_cast<float4*>(&values[warp][r][at]) = make_float4(
            group.out[r][i][0], group.out[r][i][1], group.out[r][i][2], group.out[r][i][3]);
      }
    }
  }
  finish_split<T, D, kRows, Shape::kWarps, D>(params, block, &values[0][0][0], kRows * D, states,
                                              merged);
}

}  // namespace astrai::kernels
