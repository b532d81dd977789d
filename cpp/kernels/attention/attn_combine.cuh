// From the softmax states of warps, of blocks of a cluster and of splits to one row of the result.
#pragma once

#include "kernels/attention/attn_decode_rows.cuh"
#include "kernels/common/online_softmax.cuh"
#include "kernels/common/vec.cuh"
#include "kernels/common/warp.cuh"

namespace astrai::kernels {

// Stores elements of a row: of `out` when the state is the whole row's, else of its partial slot,
// normalised by the partial's own sum. `offset` is the first element's place in the row.
template <class T, int D, int kCount>
__device__ inline void store_row(const DecodeKernelParams& params, int64_t request, int head,
                                 int partial, int offset, const float (&values)[kCount],
                                 const SoftmaxState& state) {
  const AttentionParams& attn = params.attn;
  if (params.num_partials == 1) {
    const float sink = attn.sinks != nullptr ? attn.sinks[head] : -INFINITY;
    const SoftmaxTotal total(state.max, state.sum, sink);
    const float share = state.empty() ? 0.0f : total.share(state.max, state.sum);
    T* out = static_cast<T*>(attn.out) + request * attn.out_stride_batch +
             head * attn.out_stride_head + offset;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      out[i] = from_float<T>(state.empty() ? 0.0f : values[i] / state.sum * share);
    }
    if (offset == 0 && attn.lse != nullptr) {
      attn.lse[request * attn.lse_stride_batch + head * attn.lse_stride_head] = total.lse;
    }
    return;
  }
  const int64_t slot = (request * attn.num_q_heads + head) * params.num_partials + partial;
  if (offset == 0) {
    attn.ml_part[slot * 2] = state.max;
    attn.ml_part[slot * 2 + 1] = state.sum;
  }
  if (state.empty()) return;  // the combine kernel looks at the sum first
  float* out = attn.o_part + slot * D + offset;
#pragma unroll
  for (int i = 0; i < kCount; ++i) out[i] = values[i] / state.sum;
}

// The blocks of a cluster merge their rows, found at `values` [num_rows, kRowStride] and `states`
// in each one's shared memory, and share the elements out among their threads.
template <class T, int D, int kThreads, int kRowStride>
__device__ void merge_cluster(const DecodeKernelParams& params, const DecodeBlock& block,
                              const float* values, const SoftmaxState* states) {
  constexpr int kBatch = 8;  // remote loads under way at once
  const int cluster_size = params.cluster_size;
  const int rank = cluster_rank();
  cluster_sync();
  for (int e = rank * kThreads + static_cast<int>(threadIdx.x); e < block.num_rows * D;
       e += cluster_size * kThreads) {
    const int row = e / D;
    const int at = row * kRowStride + (e - row * D);
    SoftmaxState merged;
    float value[1] = {0.0f};
    for (int first = 0; first < cluster_size; first += kBatch) {
      float max[kBatch], sum[kBatch], remote[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int peer = min(first + i, cluster_size - 1);
        max[i] = load_cluster_shared(&states[row].max, peer);
        sum[i] = load_cluster_shared(&states[row].sum, peer);
        remote[i] = load_cluster_shared(values + at, peer);
      }
      float highest = merged.max;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) highest = fmaxf(highest, max[i]);
      const float factor = rescale(merged.max, highest);
      merged.sum *= factor;
      value[0] *= factor;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i >= cluster_size || sum[i] == 0.0f) continue;
        const float weight = rescale(max[i], highest);
        merged.sum += sum[i] * weight;
        value[0] += remote[i] * weight;
      }
      merged.max = highest;
    }
    store_row<T, D>(params, block.request, block.first_head + row, block.split / cluster_size,
                    e - row * D, value, merged);
  }
  cluster_sync();  // no block may leave while others still read its shared memory
}

// Ends a decode block: merges its warps' rows and stores them, after merging them with those of the
// other blocks of its cluster if there are any. Warp w's values, not normalised, are at
// values + w * warp_stride, [num_rows, kRowStride]; those of an empty state may be anything.
// `merged` is scratch for kMaxRows states. All threads of the block call it.
template <class T, int D, int kMaxRows, int kWarps, int kRowStride>
__device__ void finish_split(const DecodeKernelParams& params, const DecodeBlock& block,
                             float* values, int warp_stride,
                             const SoftmaxState (&states)[kWarps][kMaxRows],
                             SoftmaxState (&merged)[kMaxRows]) {
  constexpr int kThreads = kWarps * kWarpSize;
  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x) * 4; e < block.num_rows * D; e += kThreads * 4) {
    const int row = e / D;
    float* own = values + row * kRowStride + (e - row * D);
    SoftmaxState state;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) state.max = fmaxf(state.max, states[w][row].max);
    float sum[4] = {};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (states[w][row].empty()) continue;
      const float weight = rescale(states[w][row].max, state.max);
      const float4 part = *reinterpret_cast<const float4*>(own + w * warp_stride);
      state.sum += states[w][row].sum * weight;
      sum[0] += part.x * weight;
      sum[1] += part.y * weight;
      sum[2] += part.z * weight;
      sum[3] += part.w * weight;
    }
    if (params.cluster_size == 1) {
      store_row<T, D>(params, block.request, block.first_head + row, block.split, e - row * D, sum,
                      state);
    } else {
      // Only this thread reads these elements, so they may replace warp 0's.
      *reinterpret_cast<float4*>(own) = make_float4(sum[0], sum[1], sum[2], sum[3]);
      if (e - row * D == 0) merged[row] = state;
    }
  }
  if (params.cluster_size > 1)
    merge_cluster<T, D, kThreads, kRowStride>(params, block, values, merged);
}

// A row's parts are shared out among groups of lanes, a vector of four elements to a lane.
template <int D>
struct CombineShape {
  static constexpr int kWarps = 8;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kVectors = D / 4;
  static constexpr int kLanes = kVectors <= 8 ? 8 : kVectors <= 16 ? 16 : 32;  // of a group
  static constexpr int kGroups = kThreads / kLanes;
  static constexpr int kPerLane = (kVectors + kLanes - 1) / kLanes;
  static constexpr int kBatch = 128;  // parts whose shares are at hand at once
};

// Merges the partials of one (request, query head) per block. Launched after the decode kernel,
// with its own start overlapped with that kernel's end. First the shares of all parts, then their
// values: two trips to memory, however many there are. Part s belongs to group s % kGroups, so that
// empty parts at the end change nothing.
template <class T, int D>
__global__ void __launch_bounds__(CombineShape<D>::kThreads)
    attn_combine_kernel(const __grid_constant__ DecodeKernelParams params) {
  using Shape = CombineShape<D>;
  __shared__ alignas(16) float group_values[Shape::kGroups][D];
  __shared__ float shares[Shape::kBatch];

  const AttentionParams& attn = params.attn;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kWarpSize;
  const int num_partials = params.num_partials;
  const int64_t first_slot = static_cast<int64_t>(blockIdx.x) * num_partials;
  const int64_t request = blockIdx.x / attn.num_q_heads;
  const int head = static_cast<int>(blockIdx.x % attn.num_q_heads);
  allow_next_grid();
  wait_for_previous_grid();

  // Every warp for itself, with the same result.
  const float2* states = reinterpret_cast<const float2*>(attn.ml_part) + first_slot;
  float max = -INFINITY;
  for (int s = lane; s < num_partials; s += kWarpSize) max = fmaxf(max, states[s].x);
  max = group_max<kWarpSize>(max);
  float sum = 0.0f;
  for (int s = lane; s < num_partials; s += kWarpSize) {
    if (states[s].y != 0.0f) sum += states[s].y * expf(states[s].x - max);
  }
  sum = group_sum<kWarpSize>(sum);
  const float sink = attn.sinks != nullptr ? attn.sinks[head] : -INFINITY;
  const SoftmaxTotal total(max, sum, sink);

  const int group = thread / Shape::kLanes;
  const int vector = thread % Shape::kLanes;
  float4 values[Shape::kPerLane] = {};
  for (int first = 0; first < num_partials; first += Shape::kBatch) {
    const int count = min(Shape::kBatch, num_partials - first);
    __syncthreads();
    if (thread < count) {
      const float2 state = states[first + thread];
      shares[thread] = state.y == 0.0f ? 0.0f : total.share(state.x, state.y);
    }
    __syncthreads();
#pragma unroll 8
    for (int s = group; s < count; s += Shape::kGroups) {
      const float share = shares[s];
      if (share == 0.0f) continue;  // an empty part has no values
      const float4* part =
          reinterpret_cast<const float4*>(attn.o_part + (first_slot + first + s) * D);
#pragma unroll
      for (int i = 0; i < Shape::kPerLane; ++i) {
        if (vector + i * Shape::kLanes >= Shape::kVectors) break;
        const float4 value = part[vector + i * Shape::kLanes];
        values[i].x += value.x * share;
        values[i].y += value.y * share;
        values[i].z += value.z * share;
        values[i].w += value.w * share;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < Shape::kPerLane; ++i) {
    const int at = vector + i * Shape::kLanes;
    if (at < Shape::kVectors) reinterpret_cast<float4*>(group_values[group])[at] = values[i];
  }
  __syncthreads();

  T* out =
      static_cast<T*>(attn.out) + request * attn.out_stride_batch + head * attn.out_stride_head;
  for (int d = thread; d < D; d += Shape::kThreads) {
    float value = 0.0f;
#pragma unroll
    for (int g = 0; g < Shape::kGroups; ++g) value += group_values[g][d];
    out[d] = from_float<T>(value);
  }
  if (thread == 0 && attn.lse != nullptr) {
    attn.lse[request * attn.lse_stride_batch + head * attn.lse_stride_head] = total.lse;
  }
}

}  // namespace astrai::kernels
