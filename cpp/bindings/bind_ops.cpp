// Norm, activation, rotary embedding, linear layer and cache write. The checks are the kernels'.
#include <nanobind/nanobind.h>

#include "bindings/module.h"
#include "bindings/scalar_arg.h"
#include "bindings/tensor_arg.h"
#include "kernels/activation/silu_mul.h"
#include "kernels/kv_cache/kv_write.h"
#include "kernels/linear/linear.h"
#include "kernels/norm/rms_norm.h"
#include "kernels/rope/rotary.h"
#include "kernels/rope/rotary_kv_write.h"

namespace astrai::bindings {

namespace {

using OptionalArg = std::optional<TensorArg>;

void bound_rms_norm(TensorArg x_arg, TensorArg weight_arg, TensorArg out_arg,
                    OptionalArg residual_arg, FloatArg eps_arg, FloatArg weight_offset_arg,
                    const StreamArg& stream) {
  constexpr const char* kOp = "rms_norm";
  const BorrowedTensor x = borrow(kOp, "x", x_arg);
  const BorrowedTensor weight = borrow(kOp, "weight", weight_arg);
  const BorrowedTensor out = borrow(kOp, "out", out_arg, Access::kWrite);
  const auto residual = borrow(kOp, "residual", residual_arg, Access::kWrite);
  const float eps = read(kOp, "eps", eps_arg);
  const float weight_offset = read(kOp, "weight_offset", weight_offset_arg);
  void* queue = stream_for(kOp, stream, x_arg, x);
  nb::gil_scoped_release release;
  kernels::rms_norm(x, weight, out, view_or_null(residual), eps, weight_offset, queue);
}

void bound_silu_mul(TensorArg gate_up_arg, TensorArg out_arg, const StreamArg& stream) {
  constexpr const char* kOp = "silu_mul";
  const BorrowedTensor gate_up = borrow(kOp, "gate_up", gate_up_arg);
  const BorrowedTensor out = borrow(kOp, "out", out_arg, Access::kWrite);
  void* queue = stream_for(kOp, stream, gate_up_arg, gate_up);
  nb::gil_scoped_release release;
  kernels::silu_mul(gate_up, out, queue);
}

void bound_rotary(TensorArg q_arg, OptionalArg k_arg, TensorArg positions_arg,
                  TensorArg cos_sin_arg, FlagArg interleaved_arg, const StreamArg& stream) {
  constexpr const char* kOp = "rotary";
  const BorrowedTensor q = borrow(kOp, "q", q_arg, Access::kWrite);
  const auto k = borrow(kOp, "k", k_arg, Access::kWrite);
  const BorrowedTensor positions = borrow(kOp, "positions", positions_arg);
  const BorrowedTensor cos_sin = borrow(kOp, "cos_sin", cos_sin_arg);
  const bool interleaved = read(kOp, "interleaved", interleaved_arg);
  void* queue = stream_for(kOp, stream, q_arg, q);
  nb::gil_scoped_release release;
  kernels::rotary(q, view_or_null(k), positions, cos_sin, interleaved, queue);
}

void bound_linear(TensorArg x_arg, TensorArg weight_arg, OptionalArg bias_arg, TensorArg out_arg,
                  const StreamArg& stream) {
  constexpr const char* kOp = "linear";
  const BorrowedTensor x = borrow(kOp, "x", x_arg);
  const BorrowedTensor weight = borrow(kOp, "weight", weight_arg);
  const auto bias = borrow(kOp, "bias", bias_arg);
  const BorrowedTensor out = borrow(kOp, "out", out_arg, Access::kWrite);
  void* queue = stream_for(kOp, stream, x_arg, x);
  nb::gil_scoped_release release;
  kernels::linear(x, weight, view_or_null(bias), out, queue);
}

void bound_kv_write(TensorArg k_arg, TensorArg v_arg, TensorArg k_pages_arg, TensorArg v_pages_arg,
                    TensorArg slot_mapping_arg, const StreamArg& stream) {
  constexpr const char* kOp = "kv_write";
  const BorrowedTensor k = borrow(kOp, "k", k_arg);
  const BorrowedTensor v = borrow(kOp, "v", v_arg);
  const BorrowedTensor k_pages = borrow(kOp, "k_pages", k_pages_arg, Access::kWrite);
  const BorrowedTensor v_pages = borrow(kOp, "v_pages", v_pages_arg, Access::kWrite);
  const BorrowedTensor slot_mapping = borrow(kOp, "slot_mapping", slot_mapping_arg);
  void* queue = stream_for(kOp, stream, k_arg, k);
  nb::gil_scoped_release release;
  kernels::kv_write(k, v, k_pages, v_pages, slot_mapping, queue);
}

void bound_rotary_kv_write(TensorArg q_arg, TensorArg k_arg, TensorArg v_arg,
                           TensorArg positions_arg, TensorArg cos_sin_arg, FlagArg interleaved_arg,
                           TensorArg k_pages_arg, TensorArg v_pages_arg, TensorArg slot_mapping_arg,
                           const StreamArg& stream) {
  constexpr const char* kOp = "rotary_kv_write";
  const BorrowedTensor q = borrow(kOp, "q", q_arg, Access::kWrite);
  const BorrowedTensor k = borrow(kOp, "k", k_arg, Access::kWrite);
  const BorrowedTensor v = borrow(kOp, "v", v_arg);
  const BorrowedTensor positions = borrow(kOp, "positions", positions_arg);
  const BorrowedTensor cos_sin = borrow(kOp, "cos_sin", cos_sin_arg);
  const BorrowedTensor k_pages = borrow(kOp, "k_pages", k_pages_arg, Access::kWrite);
  const BorrowedTensor v_pages = borrow(kOp, "v_pages", v_pages_arg, Access::kWrite);
  const BorrowedTensor slot_mapping = borrow(kOp, "slot_mapping", slot_mapping_arg);
  const bool interleaved = read(kOp, "interleaved", interleaved_arg);
  void* queue = stream_for(kOp, stream, q_arg, q);
  nb::gil_scoped_release release;
  kernels::rotary_kv_write(q, k, v, positions, cos_sin, interleaved, k_pages, v_pages, slot_mapping,
                           queue);
}

}  // namespace

void bind_ops(nb::module_& module) {
  using nb::arg;
  module.def("rms_norm", &bound_rms_norm, arg("x"), arg("weight"), arg("out"),
             arg("residual").none(), arg("eps"), arg("weight_offset"), arg("stream").none(),
             "out = h / sqrt(mean(h^2) + eps) * (weight_offset + weight), h = x, or residual + x "
             "written back to residual. See astrai.extension.ops.rms_norm.");
  module.def("silu_mul", &bound_silu_mul, arg("gate_up"), arg("out"), arg("stream").none(),
             "out = silu(first half) * second half. See astrai.extension.ops.silu_mul.");
  module.def("rotary", &bound_rotary, arg("q"), arg("k").none(), arg("positions"), arg("cos_sin"),
             arg("interleaved"), arg("stream").none(),
             "Turns q and k in place. See astrai.extension.ops.rotary.");
  module.def("linear", &bound_linear, arg("x"), arg("weight"), arg("bias").none(), arg("out"),
             arg("stream").none(), "out = x W^T + bias. See astrai.extension.ops.linear.");
  module.def("kv_write", &bound_kv_write, arg("k"), arg("v"), arg("k_pages"), arg("v_pages"),
             arg("slot_mapping"), arg("stream").none(),
             "Writes rows into their cache slots. See astrai.extension.ops.kv_write.");
  module.def("rotary_kv_write", &bound_rotary_kv_write, arg("q"), arg("k"), arg("v"),
             arg("positions"), arg("cos_sin"), arg("interleaved"), arg("k_pages"), arg("v_pages"),
             arg("slot_mapping"), arg("stream").none(),
             "Turns q and k in place and writes k and v into their cache slots. See "
             "astrai.extension.ops.rotary_kv_write.");
}

}  // namespace astrai::bindings
