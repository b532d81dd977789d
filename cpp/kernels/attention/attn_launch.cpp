#include "kernels/attention/attn_launch.h"

#include "common/check.h"
#include "common/counters.h"
#include "common/device.h"
#include "kernels/attention/attn_check.h"
#include "kernels/attention/attn_plan.h"
#include "kernels/cpu/isa.h"

#if ASTRAI_WITH_CUDA
#include "kernels/attention/attn_cuda_launch.h"
#endif

namespace astrai::kernels {
namespace {

bool has_work(const AttentionParams& params) {
  return params.num_requests > 0 && params.num_q_rows > 0;
}

void check_fixed_splits(const char* op, const AttentionOptions& options) {
  ASTRAI_CHECK_ARG(options.max_kv_len >= 0, op, ": max_kv_len is ", options.max_kv_len,
                   "; expected at least 1, or 0 for unknown");
  if (options.fixed_split_keys == 0) return;
  ASTRAI_CHECK_ARG(options.fixed_split_keys > 0 && options.fixed_split_keys % kFixedSplitUnit == 0,
                   op, ": fixed_split_keys is ", options.fixed_split_keys,
                   "; expected 0 or a multiple of ", kFixedSplitUnit);
  ASTRAI_CHECK_ARG(options.num_splits == 0, op, ": num_splits is ", options.num_splits,
                   "; expected 0, since fixed_split_keys is given too");
}

// The CPU's own choice of splits; see compute_num_splits_cpu.
void plan_cpu_splits(AttentionParams& params, int64_t capacity) {
  params.num_splits = compute_num_splits_cpu(params.kv_len, capacity);
  params.min_split_keys = kMinSplitKeys;
}

void launch_decode(const char* op, const TensorView& q, AttentionParams params,
                   const AttentionOptions& options) {
  check_fixed_splits(op, options);
#if !ASTRAI_WITH_CUDA
  if (q.device.type != DeviceType::kCpu) throw_cuda_not_built(op);
#endif
  if (!has_work(params)) return;
#if ASTRAI_WITH_CUDA
  if (q.device.type == DeviceType::kCuda) {
    launch_attn_decode_cuda(
        params, {.op = op,
                 .device = q.device.index,
                 .stream = options.stream,
                 .fixed_split_keys = options.fixed_split_keys,
                 .max_kv_len = options.max_kv_len,
                 .partials_capacity = options.o_part == nullptr ? 0 : options.o_part->shape[2]});
    return;
  }
#endif
  if (params.num_splits == 0) {
    plan_cpu_splits(params, options.o_part == nullptr ? kMaxSplits : options.o_part->shape[2]);
  }
  alloc_split_partials(params);
  count(counters().launches);
  cpu::cpu_kernels().attn_decode(params);
}

void launch_prefill(const char* op, const TensorView& q, AttentionParams params,
                    const AttentionOptions& options) {
  ASTRAI_CHECK_ARG(options.num_splits <= 1, op, ": num_splits is ", options.num_splits,
                   "; expected 0 or 1, since prefill is split over queries only");
  ASTRAI_CHECK_ARG(!options.match_decode || q.device.type == DeviceType::kCpu, op,
                   ": match_decode is true for tensors on ", device_name(q.device),
                   "; expected false, only the CPU kernel can do that");
#if !ASTRAI_WITH_CUDA
  if (q.device.type != DeviceType::kCpu) throw_cuda_not_built(op);
#endif
  if (!has_work(params)) return;
#if ASTRAI_WITH_CUDA
  if (q.device.type == DeviceType::kCuda) {
    launch_attn_prefill_cuda(params,
                             {.op = op, .device = q.device.index, .stream = options.stream});
    return;
  }
#endif
  // For requests with a single query, which are decoded.
  plan_cpu_splits(params, kMaxSplits);
  params.match_decode = options.match_decode;
  count(counters().launches);
  cpu::cpu_kernels().attn_prefill(params);
}

}  // namespace

void attn_decode(const TensorView& q, const TensorView& k, const TensorView& v,
                 const TensorView& out, int64_t causal_offset, const AttentionOptions& options) {
  constexpr const char* op = "attn_decode";
  const AttentionParams params = attn_pack_dense_params(op, q, k, v, out, causal_offset, options);
  ASTRAI_CHECK_ARG(params.q_len == 1, op, ": q has q_len ", params.q_len,
                   "; expected 1, use attn_prefill for more");
  launch_decode(op, q, params, options);
}

void attn_prefill(const TensorView& q, const TensorView& k, const TensorView& v,
                  const TensorView& out, int64_t causal_offset, const AttentionOptions& options) {
  constexpr const char* op = "attn_prefill";
  launch_prefill(op, q, attn_pack_dense_params(op, q, k, v, out, causal_offset, options), options);
}

void attn_paged_decode(const TensorView& q, const PagedKv& kv, const TensorView& out,
                       const AttentionOptions& options) {
  constexpr const char* op = "attn_paged_decode";
  const PagedCausal not_causal{.from_lengths = false};
  launch_decode(op, q, attn_pack_paged_params(op, q, kv, nullptr, out, not_causal, options),
                options);
}

void attn_paged_prefill(const TensorView& q, const PagedKv& kv, const TensorView& qo_indptr,
                        const TensorView& out, const PagedCausal& causal,
                        const AttentionOptions& options) {
  constexpr const char* op = "attn_paged_prefill";
  launch_prefill(op, q, attn_pack_paged_params(op, q, kv, &qo_indptr, out, causal, options),
                 options);
}

}  // namespace astrai::kernels
