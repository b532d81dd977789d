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

// The blocks of a cluster merge their rows, found at `values` [num_rows, D] and `states` in each
// one's shared memory, and share the elements out among their threads.
template <class T, int D, int kThreads>
__device__ void merge_cluster(const DecodeKernelParams& params, const DecodeBlock& block,
                              const float* values, const SoftmaxState* states) {
  constexpr int kBatch = 8;  // remote loads under way at once
  const int cluster_size = params.cluster_size;
  const int rank = cluster_rank();
  cluster_sync();
  for (int e = rank * kThreads + static_cast<int>(threadIdx.x); e < block.num_rows * D;
       e += cluster_size * kThreads) {
    const int row = e / D;
    SoftmaxState merged;
    float value[1] = {0.0f};
    for (int first = 0; first < cluster_size; first += kBatch) {
      float max[kBatch], sum[kBatch], remote[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int peer = min(first + i, cluster_size - 1);
        max[i] = load_cluster_shared(&states[row].max, peer);
        sum[i] = load_cluster_shared(&states[row].sum, peer);
        remote[i] = load_cluster_shared(values + e, peer);
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
// values + w * warp_stride, [num_rows, D]; those of an empty state may be anything. `merged` is
// scratch for kMaxRows states. All threads of the block call it.
template <class T, int D, int kMaxRows, int kWarps>
__device__ void finish_split(const DecodeKernelParams& params, const DecodeBlock& block,
                             float* values, int warp_stride,
                             const SoftmaxState (&states)[kWarps][kMaxRows],
                             SoftmaxState (&merged)[kMaxRows]) {
  constexpr int kThreads = kWarps * kWarpSize;
  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x) * 4; e < block.num_rows * D; e += kThreads * 4) {
    const int row = e / D;
    SoftmaxState state;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) state.max = fmaxf(state.max, states[w][row].max);
    float sum[4] = {};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (states[w][row].empty()) continue;
      const float weight = rescale(states[w][row].max, state.max);
      const float4 part = *reinterpret_cast<const float4*>(values + w * warp_stride + e);
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
      *reinterpret_cast<float4*>(values + e) = make_float4(sum[0], sum[1], sum[2], sum[3]);
      if (e - row * D == 0) merged[row] = state;
    }
  }
  if (params.cluster_size > 1) merge_cluster<T, D, kThreads>(params, block, values, merged);
}

constexpr int kCombineWarps = 4;

// Merges the partials of one (request, query head) per block. Launched after the decode kernel,
// with its own start overlapped with that kernel's end.
template <class T, int D>
__global__ void __launch_bounds__(kCombineWarps* kWarpSize)
    attn_combine_kernel(const __grid_constant__ DecodeKernelParams params) {
  constexpr int kVectors = D / 4;
  constexpr int kPerLane = (kVectors + kWarpSize - 1) / kWarpSize;
  __shared__ alignas(16) float shared_values[kCombineWarps][D];

  const AttentionParams& attn = params.attn;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int num_partials = params.num_partials;
  const int64_t first_slot = static_cast<int64_t>(blockIdx.x) * num_partials;
  const int64_t request = blockIdx.x / attn.num_q_heads;
  const int head = static_cast<int>(blockIdx.x % attn.num_q_heads);
  allow_next_grid();
  wait_for_previous_grid();

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

  float4 values[kPerLane] = {};
#pragma unroll 4
  for (int s = warp; s < num_partials; s += kCombineWarps) {
    const float2 state = states[s];
    if (state.y == 0.0f) continue;
    const float share = total.share(state.x, state.y);
    const float4* part = reinterpret_cast<const float4*>(attn.o_part + (first_slot + s) * D);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int vector = lane + i * kWarpSize;
      if (vector >= kVectors) break;
      const float4 value = part[vector];
      values[i].x += value.x * share;
      values[i].y += value.y * share;
      values[i].z += value.z * share;
      values[i].w += value.w * share;
    }
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int vector = lane + i * kWarpSize;
    if (vector < kVectors) reinterpret_cast<float4*>(shared_values[warp])[vector] = values[i];
  }
  __syncthreads();

  T* out =
      static_cast<T*>(attn.out) + request * attn.out_stride_batch + head * attn.out_stride_head;
  for (int d = static_cast<int>(threadIdx.x); d < D; d += kCombineWarps * kWarpSize) {
    float value = 0.0f;
#pragma unroll
    for (int w = 0; w < kCombineWarps; ++w) value += shared_values[w][d];
    out[d] = from_float<T>(value);
  }
  if (threadIdx.x == 0 && attn.lse != nullptr) {
    attn.lse[request * attn.lse_stride_batch + head * attn.lse_stride_head] = total.lse;
  }
}

}  // namespace astrai::kernels
