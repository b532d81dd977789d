#include "kernels/linear/linear.h"

#include "common/check.h"
#include "common/counters.h"
#include "common/device.h"
#include "kernels/common/tensor_check.h"
#include "kernels/cpu/isa.h"

namespace astrai::kernels {
namespace {

constexpr const char* kOp = "linear";

// `tensor` has the dtype of `like`, or float32.
void check_dtype_or_float32(NamedTensor tensor, NamedTensor like) {
  const DType dtype = tensor.view.dtype;
  ASTRAI_CHECK_ARG(dtype == like.view.dtype || dtype == DType::kFloat32, kOp, ": ", tensor.name,
                   " has dtype ", dtype_name(dtype), "; expected ", dtype_name(like.view.dtype),
                   " as ", like.name, like.view.dtype == DType::kFloat32 ? "" : ", or float32");
}

}  // namespace

void linear(const TensorView& x, const TensorView& weight, const TensorView* bias,
            const TensorView& out, void*) {
  check_rank(kOp, {"x", x}, 2);
  check_rank(kOp, {"weight", weight}, 2);
  check_rank(kOp, {"out", out}, 2);
  check_floating(kOp, {"weight", weight});
  check_dtype_or_float32({"x", x}, {"weight", weight});
  check_dtype_or_float32({"out", out}, {"x", x});
  const int64_t num_rows = x.shape[0];
  const int64_t num_outputs = weight.shape[0];
  const int64_t num_inputs = weight.shape[1];
  check_extent(kOp, {"x", x}, 1, num_inputs, "the columns of weight");
  check_extent(kOp, {"out", out}, 0, num_rows, "the rows of x");
  check_extent(kOp, {"out", out}, 1, num_outputs, "the rows of weight");
  check_unit_last_stride(kOp, {"x", x});
  check_unit_last_stride(kOp, {"weight", weight});
  check_unit_last_stride(kOp, {"out", out});
  check_same_device(kOp, {"x", x}, {{"weight", weight}, {"out", out}});
  check_writable(kOp, {"out", out});
  check_disjoint(kOp, {"out", out}, {"x", x});
  check_disjoint(kOp, {"out", out}, {"weight", weight});
  if (bias != nullptr) {
    check_rank(kOp, {"bias", *bias}, 1);
    check_dtype(kOp, {"bias", *bias}, weight.dtype, "as weight");
    check_extent(kOp, {"bias", *bias}, 0, num_outputs, "the rows of weight");
    check_unit_last_stride(kOp, {"bias", *bias});
    check_same_device(kOp, {"x", x}, {{"bias", *bias}});
    check_disjoint(kOp, {"out", out}, {"bias", *bias});
  }
  if (out.numel() == 0) return;
  if (x.device.type == DeviceType::kCuda) throw_cuda_not_built(kOp);

  const LinearParams params = {
      .x = x.data,
      .weight = weight.data,
      .bias = bias != nullptr ? bias->data : nullptr,
      .out = out.data,
      .x_dtype = x.dtype,
      .weight_dtype = weight.dtype,
      .out_dtype = out.dtype,
      .num_rows = num_rows,
      .num_outputs = num_outputs,
      .num_inputs = num_inputs,
      .x_stride = x.strides[0],
      .weight_stride = weight.strides[0],
      .out_stride = out.strides[0],
  };
  count(counters().launches);
  cpu::cpu_kernels().linear(params);
}

}  // namespace astrai::kernels
