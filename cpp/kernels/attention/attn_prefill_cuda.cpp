#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <limits>

#include "common/check.h"
#include "common/cuda_check.h"
#include "common/cuda_device.h"
#include "kernels/attention/attn_cuda_launch.h"
#include "kernels/attention/attn_cuda_layout.h"
#include "kernels/attention/attn_prefill_kernels.h"
#include "kernels/attention/attn_prefill_params.h"

namespace astrai::kernels {
namespace {

PrefillKernelSet kernels_for(const AttentionParams& params) {
  const bool general = params.mask != nullptr || params.softcap > 0.0f || params.scale <= 0.0f;
  switch (params.dtype) {
    case DType::kFloat32:
      return prefill_kernels_fp32(params.head_dim, general);
    case DType::kFloat16:
      return prefill_kernels_fp16(params.head_dim, general);
    default:
      return prefill_kernels_bf16(params.head_dim, general);
  }
}

// Elements of 16 bytes, the unit of the tensor-core kernel's loads, and the scalar kernel's unit.
constexpr int64_t kTileVector = 8;
constexpr int64_t kScalarVector = 4;

// More than any prefill kernel's static shared memory.
constexpr int kStaticSharedBytes = 3 * 1024;

// Wide blocks for each multiprocessor from which they beat twice as many narrow ones at every head
// dim (H200, 2026-12): at 2.9 both are as fast at head_dim 64, at 1.9 narrow ones are 1.2 times as
// fast at 128.
constexpr int64_t kMinWideBlocks = 3;

// Narrow blocks for each multiprocessor up to which dividing a row's keys pays (H200, 2026-12):
// with 2.2 it is 1.25 times as fast at head_dim 64, with 3.9 it takes 1.3 times as long at 128.
constexpr double kMaxSplitBlocks = 2.25;

constexpr float kLog2e = 1.4426950408889634f;

std::atomic<PrefillVariant> forced_variant{PrefillVariant::kAuto};

// Blocks that hold all tiles of the batch whatever its lengths are.
int64_t num_blocks(const AttentionParams& params, const PrefillKernel& kernel) {
  const int64_t group = params.num_q_heads / params.num_kv_heads;
  const int64_t rows = kernel.rows;
  int64_t tiles = 0;
  if (params.qo_indptr == nullptr) {
    tiles = (params.q_len * group + rows - 1) / rows * params.num_requests;
  } else {
    // Each request leaves less than one tile unfilled.
    tiles = params.num_q_rows * group / rows + std::min(params.num_requests, params.num_q_rows);
  }
  return tiles * params.num_kv_heads;
}

bool wide_pays(const AttentionParams& params, const PrefillKernelSet& kernels, int num_sms) {
  if (kernels.wide.rows == 0) return false;
  const int64_t rows = params.num_q_rows * (params.num_q_heads / params.num_kv_heads);
  // A typical request would leave half of a wide tile empty.
  if (rows <= kernels.narrow.rows * params.num_requests) return false;
  const int64_t blocks = rows * params.num_kv_heads / kernels.wide.rows;
  return blocks >= kMinWideBlocks * num_sms;
}

bool split_pays(const AttentionParams& params, const PrefillKernelSet& kernels, int num_sms) {
  const auto blocks = static_cast<double>(num_blocks(params, kernels.narrow));
  return params.num_splits != 1 && blocks <= kMaxSplitBlocks * num_sms;
}

const PrefillKernel& choose_kernel(const PrefillKernelSet& kernels, const AttentionParams& params,
                                   const PrefillLaunch& launch) {
  const PrefillVariant variant = forced_variant.load(std::memory_order_relaxed);
  const bool tensor_cores =
      kernels.narrow.config.function != nullptr && kv_rows_aligned(params, kTileVector);
  if (!tensor_cores || variant == PrefillVariant::kScalar) return kernels.scalar;
  const CudaDevice& device = cuda_device(launch.device);
  const auto fits = [&](const PrefillKernel& kernel) {
    return kernel.config.function != nullptr &&
           kernel.config.shared_bytes + kStaticSharedBytes <= device.max_shared_bytes;
  };
  const auto serves = [&](const PrefillKernel& kernel, PrefillVariant name, bool pays) {
    return fits(kernel) && (variant == name || (variant == PrefillVariant::kAuto && pays));
  };
  const int num_sms = device.num_sms;
  if (serves(kernels.split, PrefillVariant::kSplit, split_pays(params, kernels, num_sms))) {
    return kernels.split;
  }
  if (serves(kernels.wide, PrefillVariant::kWide, wide_pays(params, kernels, num_sms))) {
    return kernels.wide;
  }
  return kernels.narrow;
}

}  // namespace

void force_prefill_variant(PrefillVariant variant) {
  forced_variant.store(variant, std::memory_order_relaxed);
}

void launch_attn_prefill_cuda(const AttentionParams& params, const PrefillLaunch& launch) {
  if (params.num_requests == 0 || params.num_q_rows == 0) return;
  constexpr int64_t kLimit = std::numeric_limits<int32_t>::max();
  ASTRAI_CHECK_ARG(params.kv_len < kLimit / 2, launch.op, ": kv_len ", params.kv_len,
                   "; expected fewer than 2^30 keys");
  const int64_t group = params.num_q_heads / params.num_kv_heads;
  ASTRAI_CHECK_ARG(params.num_q_rows <= kLimit / 2 / group, launch.op, ": ", params.num_q_rows,
                   " query rows with ", group,
                   " query heads for each KV head; expected fewer than 2^30 in total");
  const CudaDeviceGuard guard(launch.device);
  const PrefillKernelSet kernels = kernels_for(params);
  const PrefillKernel& kernel = choose_kernel(kernels, params, launch);
  const int64_t blocks = num_blocks(params, kernel);
  ASTRAI_CHECK_ARG(blocks <= kLimit, launch.op, ": ", params.num_q_rows, " query rows with ",
                   params.num_kv_heads, " KV heads; expected at most 2^31 - 1 tiles of ",
                   kernel.rows);
  const PrefillKernelParams args{.attn = params,
                                 .group_size = static_cast<int>(group),
                                 .scale_log2 = params.scale * kLog2e,
                                 .page_shift = page_shift(params.page_size),
                                 .q_vectors = q_rows_aligned(params, kTileVector),
                                 .kv_vectors = kv_rows_aligned(params, kScalarVector),
                                 .out_vectors = out_rows_aligned(params, kTileVector)};
  launch_kernel(kernel.config, {.x = static_cast<unsigned>(blocks)}, &args, launch.device,
                static_cast<cudaStream_t>(launch.stream));
}

}  // namespace astrai::kernels
