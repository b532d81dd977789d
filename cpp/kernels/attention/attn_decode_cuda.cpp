#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <limits>

#include "common/check.h"
#include "common/cuda_check.h"
#include "common/cuda_device.h"
#include "kernels/attention/attn_cuda_launch.h"
#include "kernels/attention/attn_decode_kernels.h"
#include "kernels/attention/attn_decode_params.h"

namespace astrai::kernels {
namespace {

DecodeKernelSet kernels_for(const AttentionParams& params) {
  switch (params.dtype) {
    case DType::kFloat32:
      return decode_kernels_fp32(params.head_dim);
    case DType::kFloat16:
      return decode_kernels_fp16(params.head_dim);
    default:
      return decode_kernels_bf16(params.head_dim);
  }
}

struct Axis {
  int64_t extent;
  int64_t stride;
};

// True when every row of the tensor starts at a multiple of `elements` elements. The stride of an
// axis of extent 1 addresses nothing and may be anything.
bool rows_aligned(const void* data, int64_t element_bytes, int64_t elements,
                  std::initializer_list<Axis> axes) {
  if (reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(elements * element_bytes) != 0) {
    return false;
  }
  return std::all_of(axes.begin(), axes.end(), [&](const Axis& axis) {
    return axis.extent <= 1 || axis.stride % elements == 0;
  });
}

bool kv_aligned(const AttentionParams& params, int64_t elements) {
  const bool paged = params.page_size > 0;
  const int64_t batch = paged ? params.num_pages : params.num_requests;
  const int64_t tokens = paged ? params.page_size : params.kv_len;
  const int64_t bytes = dtype_bytes(params.dtype);
  return rows_aligned(params.k, bytes, elements,
                      {{batch, params.k_stride_batch},
                       {tokens, params.k_stride_token},
                       {params.num_kv_heads, params.k_stride_head}}) &&
         rows_aligned(params.v, bytes, elements,
                      {{batch, params.v_stride_batch},
                       {tokens, params.v_stride_token},
                       {params.num_kv_heads, params.v_stride_head}});
}

bool q_aligned(const AttentionParams& params, int64_t elements) {
  return rows_aligned(
      params.q, dtype_bytes(params.dtype), elements,
      {{params.num_requests, params.q_stride_batch}, {params.num_q_heads, params.q_stride_head}});
}

// Elements of 16 bytes, the unit of the tensor-core kernel's loads, and of its query loads.
constexpr int64_t kTileVector = 8;
constexpr int64_t kQueryVector = 2;
// The scalar kernel's unit.
constexpr int64_t kScalarVector = 4;

std::atomic<DecodeVariant> forced_variant{DecodeVariant::kAuto};

bool choose_tensor_cores(const AttentionParams& params, const DecodeKernelSet& kernels,
                         const DecodeLaunch& launch) {
  const DecodeVariant variant = forced_variant.load(std::memory_order_relaxed);
  const bool possible =
      kernels.tensor_cores.config.function != nullptr && kv_aligned(params, kTileVector);
  ASTRAI_CHECK_ARG(variant != DecodeVariant::kTensorCores || possible, launch.op,
                   ": the tensor-core kernel was asked for with dtype ", dtype_name(params.dtype),
                   "; expected 16-bit elements with rows of k and v aligned to 16 bytes");
  return possible && variant != DecodeVariant::kScalar;
}

DecodePlan make_plan(const AttentionParams& params, const DecodeLaunch& launch,
                     const DecodeDeviceFacts& facts, int64_t num_units) {
  const bool paged = params.page_size > 0;
  // kv_len bounds one request by all pages together; the typical one has its share of them.
  const int64_t typical =
      paged ? (params.kv_len + params.num_requests - 1) / params.num_requests : params.kv_len;
  const DecodeBatch batch{.num_units = num_units, .kv_len = typical, .max_kv_len = params.kv_len};
  const int64_t max_partials =
      params.o_part == nullptr ? std::numeric_limits<int64_t>::max() : launch.partials_capacity;
  if (launch.fixed_split_keys > 0) {
    return plan_decode_fixed(facts, batch, launch.fixed_split_keys, max_partials);
  }
  if (params.num_splits > 0) return plan_decode_given(facts, params.num_splits);
  return plan_decode(facts, batch, max_partials);
}

}  // namespace

void force_decode_variant(DecodeVariant variant) {
  forced_variant.store(variant, std::memory_order_relaxed);
}

void launch_attn_decode_cuda(AttentionParams params, const DecodeLaunch& launch) {
  if (params.num_requests == 0) return;
  ASTRAI_CHECK_ARG(params.kv_len < std::numeric_limits<int32_t>::max() / 2, launch.op, ": kv_len ",
                   params.kv_len, "; expected fewer than 2^30 keys");
  const CudaDeviceGuard guard(launch.device);
  const CudaDevice& device = cuda_device(launch.device);
  const auto stream = static_cast<cudaStream_t>(launch.stream);

  const DecodeKernelSet kernels = kernels_for(params);
  const bool tensor_cores = choose_tensor_cores(params, kernels, launch);
  const DecodeKernel& kernel = tensor_cores ? kernels.tensor_cores : kernels.scalar;
  const KernelFacts& facts = prepare_kernel(kernel.config, launch.device);

  DecodeKernelParams args;
  args.group_size = static_cast<int>(params.num_q_heads / params.num_kv_heads);
  args.num_head_tiles = (args.group_size + kernel.rows - 1) / kernel.rows;
  const int64_t num_units = params.num_requests * params.num_kv_heads * args.num_head_tiles;
  ASTRAI_CHECK_ARG(num_units <= std::numeric_limits<int32_t>::max(), launch.op, ": ",
                   params.num_requests, " requests with ", params.num_kv_heads,
                   " KV heads; expected at most 2^31 - 1 pairs");
  const DecodePlan plan = make_plan(
      params, launch,
      {.num_sms = device.num_sms,
       .blocks_per_sm = facts.blocks_per_sm,
       .block_tile_keys = kernel.block_tile_keys,
       .max_cluster_size = std::min<int64_t>(launch.max_cluster_size, facts.max_cluster_size)},
      num_units);
  params.num_splits = plan.num_splits;
  params.min_split_keys = plan.min_split_keys;
  args.cluster_size = static_cast<int>(plan.cluster_size);
  args.num_partials = static_cast<int>(plan.num_partials());
  args.vector_loads =
      tensor_cores ? q_aligned(params, kQueryVector) : kv_aligned(params, kScalarVector);

  const bool needs_scratch = args.num_partials > 1 && params.o_part == nullptr;
  const int64_t partial_rows = params.num_requests * params.num_q_heads * args.num_partials;
  const StreamScratch scratch(
      needs_scratch ? partial_rows * (params.head_dim + 2) * static_cast<int64_t>(sizeof(float))
                    : 0,
      launch.device, stream);
  if (needs_scratch) {
    params.o_part = static_cast<float*>(scratch.data());
    params.ml_part = params.o_part + partial_rows * params.head_dim;
  }
  args.attn = params;
  launch_kernel(kernel.config,
                {.x = static_cast<unsigned>(num_units),
                 .y = static_cast<unsigned>(plan.num_splits),
                 .cluster_y = static_cast<unsigned>(plan.cluster_size)},
                &args, launch.device, stream);
  if (args.num_partials > 1) {
    launch_kernel(kernels.combine,
                  {.x = static_cast<unsigned>(params.num_requests * params.num_q_heads)}, &args,
                  launch.device, stream);
  }
}

}  // namespace astrai::kernels
