#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <limits>

#include "common/check.h"
#include "common/cuda_check.h"
#include "common/cuda_device.h"
#include "kernels/attention/attn_cuda_launch.h"
#include "kernels/attention/attn_cuda_layout.h"
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

// See DecodeKernelParams::linear_rows.
bool has_linear_rows(const AttentionParams& params) {
  constexpr int64_t kLimit = std::numeric_limits<int32_t>::max();
  const int64_t page_size = params.page_size;
  if (page_size > 0 && params.num_pages > kLimit / page_size) return false;
  const auto linear = [&](int64_t page_stride, int64_t token_stride) {
    return token_stride >= 0 && token_stride <= kLimit &&
           (page_size == 0 || params.num_pages == 1 || page_stride == page_size * token_stride);
  };
  return linear(params.k_stride_batch, params.k_stride_token) &&
         linear(params.v_stride_batch, params.v_stride_token);
}

// Elements of 16 bytes, the unit of the tensor-core kernel's loads.
constexpr int64_t kTileVector = 8;
constexpr int64_t kTileElementBytes = 2;

// Bytes for each multiprocessor above which two narrow blocks on it are as fast as a wide one
// (H200, 2026-11).
constexpr int64_t kMaxWideBytes = int64_t{2} << 20;

// A warp for each of a multiprocessor's four schedulers.
constexpr int kBusyThreads = 128;
// The scalar kernel's unit.
constexpr int64_t kScalarVector = 4;

// More than any decode kernel's static shared memory.
constexpr int kStaticSharedBytes = 12 * 1024;

std::atomic<DecodeVariant> forced_variant{DecodeVariant::kAuto};
std::atomic<int64_t> forced_max_cluster{0};

// A kernel and how it cuts the batch.
struct Choice {
  const DecodeKernel* kernel = nullptr;
  bool tensor_cores = false;
  int group_size = 1;
  int num_head_tiles = 1;
  int64_t num_units = 0;
  DecodePlan plan;
};

// params.kv_len bounds one paged request by all pages together; a typical one has its share of
// them.
int64_t typical_kv_len(const AttentionParams& params) {
  if (params.page_size == 0) return params.kv_len;
  return (params.kv_len + params.num_requests - 1) / params.num_requests;
}

int64_t longest_kv_len(const AttentionParams& params, const DecodeLaunch& launch) {
  return launch.max_kv_len > 0 ? std::min(launch.max_kv_len, params.kv_len) : params.kv_len;
}

DecodePlan make_plan(const AttentionParams& params, const DecodeLaunch& launch,
                     const DecodeDeviceFacts& facts, int64_t num_units) {
  const DecodeBatch batch{.num_units = num_units,
                          .kv_len = typical_kv_len(params),
                          .max_kv_len = longest_kv_len(params, launch),
                          .key_bytes = 2 * params.head_dim * dtype_bytes(params.dtype)};
  const int64_t max_partials =
      params.o_part == nullptr ? std::numeric_limits<int64_t>::max() : launch.partials_capacity;
  if (launch.fixed_split_keys > 0) {
    return plan_decode_fixed(facts, batch, launch.fixed_split_keys, max_partials);
  }
  if (params.num_splits > 0) return plan_decode_given(facts, batch, params.num_splits);
  return plan_decode(facts, batch, max_partials);
}

Choice plan_kernel(const DecodeKernelSet& kernels, const DecodeKernel& kernel,
                   const AttentionParams& params, const DecodeLaunch& launch) {
  const KernelFacts& facts = prepare_kernel(kernel.config, launch.device);
  Choice choice;
  choice.kernel = &kernel;
  choice.tensor_cores = &kernel != &kernels.scalar;
  choice.group_size = static_cast<int>(params.num_q_heads / params.num_kv_heads);
  choice.num_head_tiles = (choice.group_size + kernel.rows - 1) / kernel.rows;
  choice.num_units = params.num_requests * params.num_kv_heads * choice.num_head_tiles;
  DecodeDeviceFacts device{.num_sms = cuda_device(launch.device).num_sms,
                           .blocks_per_sm = facts.blocks_per_sm,
                           .block_tile_keys = kernel.block_tile_keys};
  const int64_t forced = forced_max_cluster.load(std::memory_order_relaxed);
  for (size_t i = 0; i < facts.active_clusters.size(); ++i) {
    if (forced > 0 && int64_t{1} << i > forced) break;
    device.active_clusters.at(i) = facts.active_clusters[i];
  }
  choice.plan = make_plan(params, launch, device, choice.num_units);
  return choice;
}

Choice choose_kernel(const DecodeKernelSet& kernels, const AttentionParams& params,
                     const DecodeLaunch& launch) {
  const DecodeVariant variant = forced_variant.load(std::memory_order_relaxed);
  const bool possible =
      kernels.narrow.config.function != nullptr && kv_rows_aligned(params, kTileVector);
  const bool asked = variant == DecodeVariant::kNarrow || variant == DecodeVariant::kWide;
  ASTRAI_CHECK_ARG(possible || !asked, launch.op,
                   ": the tensor-core kernel was asked for with dtype ", dtype_name(params.dtype),
                   "; expected 16-bit elements with rows of k and v aligned to 16 bytes");
  if (!possible || variant == DecodeVariant::kScalar) {
    return plan_kernel(kernels, kernels.scalar, params, launch);
  }
  const Choice narrow = plan_kernel(kernels, kernels.narrow, params, launch);
  if (variant == DecodeVariant::kNarrow || launch.fixed_split_keys > 0) return narrow;
  const CudaDevice& device = cuda_device(launch.device);
  const bool wide_fits =
      kernels.wide.config.function != nullptr &&
      kernels.wide.config.shared_bytes + kStaticSharedBytes <= device.max_shared_bytes;
  // Blocks can have a multiprocessor each, and more to load than the narrow shape has under way; or
  // the narrow shape has too few warps to keep one busy.
  const int64_t sm_bytes = narrow.num_units * typical_kv_len(params) * params.head_dim *
                           (2 * kTileElementBytes) / device.num_sms;
  const bool narrow_is_slow =
      sm_bytes > kernels.narrow.config.shared_bytes || kernels.narrow.config.threads < kBusyThreads;
  const bool wide_pays =
      narrow.num_units <= device.num_sms / 2 && narrow_is_slow && sm_bytes < kMaxWideBytes;
  if (wide_fits && (wide_pays || variant == DecodeVariant::kWide)) {
    return plan_kernel(kernels, kernels.wide, params, launch);
  }
  return narrow;
}

}  // namespace

void force_decode_max_cluster(int64_t size) {
  forced_max_cluster.store(size, std::memory_order_relaxed);
}

void force_decode_variant(DecodeVariant variant) {
  forced_variant.store(variant, std::memory_order_relaxed);
}

void launch_attn_decode_cuda(AttentionParams params, const DecodeLaunch& launch) {
  if (params.num_requests == 0) return;
  ASTRAI_CHECK_ARG(params.kv_len < std::numeric_limits<int32_t>::max() / 2, launch.op, ": kv_len ",
                   params.kv_len, "; expected fewer than 2^30 keys");
  const CudaDeviceGuard guard(launch.device);
  const auto stream = static_cast<cudaStream_t>(launch.stream);

  const DecodeKernelSet kernels = kernels_for(params);
  const Choice choice = choose_kernel(kernels, params, launch);
  ASTRAI_CHECK_ARG(choice.num_units <= std::numeric_limits<int32_t>::max(), launch.op, ": ",
                   params.num_requests, " requests with ", params.num_kv_heads,
                   " KV heads; expected at most 2^31 - 1 pairs");
  params.num_splits = choice.plan.num_splits;
  params.min_split_keys = choice.plan.min_split_keys;
  DecodeKernelParams args;
  args.group_size = choice.group_size;
  args.num_head_tiles = choice.num_head_tiles;
  args.cluster_size = static_cast<int>(choice.plan.cluster_size);
  args.num_partials = static_cast<int>(choice.plan.num_partials());
  args.vector_loads = choice.tensor_cores ? q_rows_aligned(params, kTileVector)
                                          : kv_rows_aligned(params, kScalarVector);
  args.page_shift = page_shift(params.page_size);
  args.linear_rows = has_linear_rows(params);

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
  launch_kernel(choice.kernel->config,
                {.x = static_cast<unsigned>(choice.num_units),
                 .y = static_cast<unsigned>(choice.plan.num_splits),
                 .cluster_y = static_cast<unsigned>(choice.plan.cluster_size)},
                &args, launch.device, stream);
  if (args.num_partials > 1) {
    launch_kernel(kernels.combine,
                  {.x = static_cast<unsigned>(params.num_requests * params.num_q_heads)}, &args,
                  launch.device, stream);
  }
}

}  // namespace astrai::kernels
