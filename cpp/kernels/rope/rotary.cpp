#include "kernels/rope/rotary.h"

#include "common/check.h"
#include "common/counters.h"
#include "common/device.h"
#include "kernels/common/tensor_check.h"
#include "kernels/cpu/isa.h"

#if ASTRAI_WITH_CUDA
#include "kernels/rope/rotary_cuda_launch.h"
#endif

namespace astrai::kernels {
namespace {

void check_heads(const char* op, NamedTensor tensor) {
  check_rank(op, tensor, 3);
  check_floating(op, tensor);
  check_unit_last_stride(op, tensor);
  check_writable(op, tensor);
}

void check_table(const char* op, const TensorView& cos_sin, int64_t head_dim) {
  const NamedTensor table = {"cos_sin", cos_sin};
  check_rank(op, table, 2);
  check_dtype(op, table, DType::kFloat32);
  check_unit_last_stride(op, table);
  const int64_t rotary_dim = cos_sin.shape[1];
  ASTRAI_CHECK_ARG(rotary_dim % 2 == 0, op, ": cos_sin has rotary width ", rotary_dim,
                   "; expected an even number");
  ASTRAI_CHECK_ARG(rotary_dim <= head_dim, op, ": cos_sin has rotary width ", rotary_dim,
                   "; expected at most the head dim ", head_dim);
}

void check_positions(const char* op, const TensorView& positions, int64_t num_tokens) {
  const NamedTensor argument = {"positions", positions};
  check_rank(op, argument, 1);
  ASTRAI_CHECK_ARG(positions.dtype == DType::kInt32 || positions.dtype == DType::kInt64, op,
                   ": positions has dtype ", dtype_name(positions.dtype),
                   "; expected int32 or int64");
  check_extent(op, argument, 0, num_tokens, "the tokens of q");
  check_unit_last_stride(op, argument);
}

template <class Int>
void check_position_values(const char* op, const Int* positions, int64_t num_tokens,
                           int64_t max_position) {
  for (int64_t token = 0; token < num_tokens; ++token) {
    ASTRAI_CHECK_ARG(positions[token] >= 0 && positions[token] < max_position, op, ": positions[",
                     token, "] is ", positions[token], "; expected 0 to ", max_position - 1,
                     ", the rows of cos_sin");
  }
}

}  // namespace

RotaryParams pack_rotary_params(const char* op, const TensorView& q, const TensorView* k,
                                const TensorView& positions, const TensorView& cos_sin,
                                bool interleaved) {
  check_heads(op, {"q", q});
  const int64_t num_tokens = q.shape[0];
  const int64_t head_dim = q.shape[2];
  check_table(op, cos_sin, head_dim);
  check_positions(op, positions, num_tokens);
  check_same_device(op, {"q", q}, {{"positions", positions}, {"cos_sin", cos_sin}});
  check_disjoint(op, {"q", q}, {"cos_sin", cos_sin});
  check_disjoint(op, {"q", q}, {"positions", positions});
  if (k != nullptr) {
    check_heads(op, {"k", *k});
    check_dtype(op, {"k", *k}, q.dtype, "as q");
    check_extent(op, {"k", *k}, 0, num_tokens, "the tokens of q");
    check_extent(op, {"k", *k}, 2, head_dim, "the head dim of q");
    check_same_device(op, {"q", q}, {{"k", *k}});
    check_disjoint(op, {"k", *k}, {"q", q});
    check_disjoint(op, {"k", *k}, {"cos_sin", cos_sin});
    check_disjoint(op, {"k", *k}, {"positions", positions});
  }
  const int64_t max_position = cos_sin.shape[0];
  const bool positions_are_int64 = positions.dtype == DType::kInt64;
  const bool on_cpu = q.device.type == DeviceType::kCpu;
  if (on_cpu && positions_are_int64) {
    check_position_values(op, positions.ptr<int64_t>(), num_tokens, max_position);
  } else if (on_cpu) {
    check_position_values(op, positions.ptr<int32_t>(), num_tokens, max_position);
  }
  return {
      .q = q.data,
      .k = k != nullptr ? k->data : nullptr,
      .positions = positions.data,
      .cos_sin = cos_sin.ptr<float>(),
      .dtype = q.dtype,
      .positions_are_int64 = positions_are_int64,
      .interleaved = interleaved,
      .num_tokens = num_tokens,
      .num_q_heads = q.shape[1],
      .num_kv_heads = k != nullptr ? k->shape[1] : 0,
      .head_dim = head_dim,
      .rotary_dim = cos_sin.shape[1],
      .max_position = max_position,
      .q_stride_token = q.strides[0],
      .q_stride_head = q.strides[1],
      .k_stride_token = k != nullptr ? k->strides[0] : 0,
      .k_stride_head = k != nullptr ? k->strides[1] : 0,
      .cos_sin_stride = cos_sin.strides[0],
  };
}

void rotary(const TensorView& q, const TensorView* k, const TensorView& positions,
            const TensorView& cos_sin, bool interleaved, [[maybe_unused]] void* stream) {
  constexpr const char* op = "rotary";
  const RotaryParams params = pack_rotary_params(op, q, k, positions, cos_sin, interleaved);
  const int64_t num_heads = params.num_q_heads + params.num_kv_heads;
  const bool nothing_to_turn = params.num_tokens * num_heads * params.rotary_dim == 0;
  if (nothing_to_turn) return;
  if (q.device.type == DeviceType::kCuda) {
#if ASTRAI_WITH_CUDA
    launch_rotary_cuda(params, q.device.index, stream);
    return;
#else
    throw_cuda_not_built(op);
#endif
  }
  count(counters().launches);
  cpu::cpu_kernels().rotary(params);
}

}  // namespace astrai::kernels
