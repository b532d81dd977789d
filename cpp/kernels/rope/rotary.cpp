#include "kernels/rope/rotary.h"

#include "common/check.h"
#include "common/counters.h"
#include "common/device.h"
#include "kernels/common/tensor_check.h"
#include "kernels/cpu/isa.h"

namespace astrai::kernels {
namespace {

constexpr const char* kOp = "rotary";

void check_heads(NamedTensor tensor) {
  check_rank(kOp, tensor, 3);
  check_floating(kOp, tensor);
  check_unit_last_stride(kOp, tensor);
  check_writable(kOp, tensor);
}

void check_table(const TensorView& cos_sin, int64_t head_dim) {
  const NamedTensor table = {"cos_sin", cos_sin};
  check_rank(kOp, table, 2);
  check_dtype(kOp, table, DType::kFloat32);
  check_unit_last_stride(kOp, table);
  const int64_t rotary_dim = cos_sin.shape[1];
  ASTRAI_CHECK_ARG(rotary_dim % 2 == 0, kOp, ": cos_sin has rotary width ", rotary_dim,
                   "; expected an even number");
  ASTRAI_CHECK_ARG(rotary_dim <= head_dim, kOp, ": cos_sin has rotary width ", rotary_dim,
                   "; expected at most the head dim ", head_dim);
}

void check_positions(const TensorView& positions, int64_t num_tokens) {
  const NamedTensor argument = {"positions", positions};
  check_rank(kOp, argument, 1);
  ASTRAI_CHECK_ARG(positions.dtype == DType::kInt32 || positions.dtype == DType::kInt64, kOp,
                   ": positions has dtype ", dtype_name(positions.dtype),
                   "; expected int32 or int64");
  check_extent(kOp, argument, 0, num_tokens, "the tokens of q");
  check_unit_last_stride(kOp, argument);
}

template <class Int>
void check_position_values(const Int* positions, int64_t num_tokens, int64_t max_position) {
  for (int64_t token = 0; token < num_tokens; ++token) {
    ASTRAI_CHECK_ARG(positions[token] >= 0 && positions[token] < max_position, kOp, ": positions[",
                     token, "] is ", positions[token], "; expected 0 to ", max_position - 1,
                     ", the rows of cos_sin");
  }
}

}  // namespace

void rotary(const TensorView& q, const TensorView* k, const TensorView& positions,
            const TensorView& cos_sin, bool interleaved, void*) {
  check_heads({"q", q});
  const int64_t num_tokens = q.shape[0];
  const int64_t head_dim = q.shape[2];
  check_table(cos_sin, head_dim);
  check_positions(positions, num_tokens);
  check_same_device(kOp, {"q", q}, {{"positions", positions}, {"cos_sin", cos_sin}});
  check_disjoint(kOp, {"q", q}, {"cos_sin", cos_sin});
  check_disjoint(kOp, {"q", q}, {"positions", positions});
  if (k != nullptr) {
    check_heads({"k", *k});
    check_dtype(kOp, {"k", *k}, q.dtype, "as q");
    check_extent(kOp, {"k", *k}, 0, num_tokens, "the tokens of q");
    check_extent(kOp, {"k", *k}, 2, head_dim, "the head dim of q");
    check_same_device(kOp, {"q", q}, {{"k", *k}});
    check_disjoint(kOp, {"k", *k}, {"q", q});
    check_disjoint(kOp, {"k", *k}, {"cos_sin", cos_sin});
    check_disjoint(kOp, {"k", *k}, {"positions", positions});
  }
  const int64_t max_position = cos_sin.shape[0];
  const bool positions_are_int64 = positions.dtype == DType::kInt64;
  const bool on_cpu = q.device.type == DeviceType::kCpu;
  if (on_cpu && positions_are_int64) {
    check_position_values(positions.ptr<int64_t>(), num_tokens, max_position);
  } else if (on_cpu) {
    check_position_values(positions.ptr<int32_t>(), num_tokens, max_position);
  }
  const int64_t num_kv_heads = k != nullptr ? k->shape[1] : 0;
  const bool nothing_to_turn = num_tokens * (q.shape[1] + num_kv_heads) * cos_sin.shape[1] == 0;
  if (nothing_to_turn) return;
  if (!on_cpu) throw_cuda_not_built(kOp);

  const RotaryParams params = {
      .q = q.data,
      .k = k != nullptr ? k->data : nullptr,
      .positions = positions.data,
      .cos_sin = cos_sin.ptr<float>(),
      .dtype = q.dtype,
      .positions_are_int64 = positions_are_int64,
      .interleaved = interleaved,
      .num_tokens = num_tokens,
      .num_q_heads = q.shape[1],
      .num_kv_heads = num_kv_heads,
      .head_dim = head_dim,
      .rotary_dim = cos_sin.shape[1],
      .max_position = max_position,
      .q_stride_token = q.strides[0],
      .q_stride_head = q.strides[1],
      .k_stride_token = k != nullptr ? k->strides[0] : 0,
      .k_stride_head = k != nullptr ? k->strides[1] : 0,
      .cos_sin_stride = cos_sin.strides[0],
  };
  count(counters().launches);
  cpu::cpu_kernels().rotary(params);
}

}  // namespace astrai::kernels
