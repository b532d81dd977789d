#include "kernels/norm/rms_norm.h"

#include <cmath>

#include "common/check.h"
#include "common/counters.h"
#include "common/device.h"
#include "kernels/common/tensor_check.h"
#include "kernels/cpu/isa.h"

namespace astrai::kernels {
namespace {

constexpr const char* kOp = "rms_norm";

void check_rows(NamedTensor tensor, const TensorView& x) {
  check_rank(kOp, tensor, 2);
  check_dtype(kOp, tensor, x.dtype, "as x");
  check_extent(kOp, tensor, 0, x.shape[0], "the rows of x");
  check_extent(kOp, tensor, 1, x.shape[1], "the columns of x");
  check_unit_last_stride(kOp, tensor);
  check_writable(kOp, tensor);
}

}  // namespace

void rms_norm(const TensorView& x, const TensorView& weight, const TensorView& out,
              const TensorView* residual, float eps, float weight_offset, void*) {
  check_rank(kOp, {"x", x}, 2);
  check_floating(kOp, {"x", x});
  check_unit_last_stride(kOp, {"x", x});
  check_rank(kOp, {"weight", weight}, 1);
  check_dtype(kOp, {"weight", weight}, x.dtype, "as x");
  check_extent(kOp, {"weight", weight}, 0, x.shape[1], "the columns of x");
  check_unit_last_stride(kOp, {"weight", weight});
  check_rows({"out", out}, x);
  check_same_device(kOp, {"x", x}, {{"weight", weight}, {"out", out}});
  check_disjoint_or_same(kOp, {"out", out}, {"x", x});
  check_disjoint(kOp, {"out", out}, {"weight", weight});
  if (residual != nullptr) {
    check_rows({"residual", *residual}, x);
    check_same_device(kOp, {"x", x}, {{"residual", *residual}});
    check_disjoint(kOp, {"residual", *residual}, {"x", x});
    check_disjoint(kOp, {"residual", *residual}, {"out", out});
    check_disjoint(kOp, {"residual", *residual}, {"weight", weight});
  }
  ASTRAI_CHECK_ARG(eps >= 0.0f && std::isfinite(eps), kOp, ": eps is ", eps,
                   "; expected a finite number >= 0");
  ASTRAI_CHECK_ARG(std::isfinite(weight_offset), kOp, ": weight_offset is ", weight_offset,
                   "; expected a finite number");
  if (x.numel() == 0) return;
  if (x.device.type == DeviceType::kCuda) throw_cuda_not_built(kOp);

  const RmsNormParams params = {
      .x = x.data,
      .residual = residual != nullptr ? residual->data : nullptr,
      .weight = weight.data,
      .out = out.data,
      .dtype = x.dtype,
      .num_rows = x.shape[0],
      .num_columns = x.shape[1],
      .x_stride = x.strides[0],
      .residual_stride = residual != nullptr ? residual->strides[0] : 0,
      .out_stride = out.strides[0],
      .eps = eps,
      .weight_offset = weight_offset,
  };
  count(counters().launches);
  cpu::cpu_kernels().rms_norm(params);
}

}  // namespace astrai::kernels
