#include "kernels/activation/silu_mul.h"

#include "common/check.h"
#include "common/counters.h"
#include "common/device.h"
#include "kernels/common/tensor_check.h"
#include "kernels/cpu/isa.h"

namespace astrai::kernels {

void silu_mul(const TensorView& gate_up, const TensorView& out, void*) {
  constexpr const char* kOp = "silu_mul";
  check_rank(kOp, {"gate_up", gate_up}, 2);
  check_floating(kOp, {"gate_up", gate_up});
  ASTRAI_CHECK_ARG(gate_up.shape[1] % 2 == 0, kOp, ": gate_up has shape ", gate_up.shape_string(),
                   "; expected an even number of columns, gate then up");
  check_unit_last_stride(kOp, {"gate_up", gate_up});
  check_rank(kOp, {"out", out}, 2);
  check_dtype(kOp, {"out", out}, gate_up.dtype, "as gate_up");
  check_extent(kOp, {"out", out}, 0, gate_up.shape[0], "the rows of gate_up");
  check_extent(kOp, {"out", out}, 1, gate_up.shape[1] / 2, "half the columns of gate_up");
  check_unit_last_stride(kOp, {"out", out});
  check_same_device(kOp, {"gate_up", gate_up}, {{"out", out}});
  check_writable(kOp, {"out", out});
  check_disjoint(kOp, {"out", out}, {"gate_up", gate_up});
  if (out.numel() == 0) return;
  if (gate_up.device.type == DeviceType::kCuda) throw_cuda_not_built(kOp);

  const SiluMulParams params = {
      .gate_up = gate_up.data,
      .out = out.data,
      .dtype = gate_up.dtype,
      .num_rows = out.shape[0],
      .num_columns = out.shape[1],
      .gate_up_stride = gate_up.strides[0],
      .out_stride = out.strides[0],
  };
  count(counters().launches);
  cpu::cpu_kernels().silu_mul(params);
}

}  // namespace astrai::kernels
