#include "kernels/rope/rotary_kv_write.h"

#include "common/counters.h"
#include "common/device.h"
#include "kernels/common/tensor_check.h"
#include "kernels/cpu/isa.h"

#if ASTRAI_WITH_CUDA
#include "kernels/rope/rotary_cuda_launch.h"
#endif

namespace astrai::kernels {

void rotary_kv_write(const TensorView& q, const TensorView& k, const TensorView& v,
                     const TensorView& positions, const TensorView& cos_sin, bool interleaved,
                     const TensorView& k_pages, const TensorView& v_pages,
                     const TensorView& slot_mapping, [[maybe_unused]] void* stream) {
  constexpr const char* op = "rotary_kv_write";
  const RotaryKvWriteParams params = {
      .rotary = pack_rotary_params(op, q, &k, positions, cos_sin, interleaved),
      .kv = pack_kv_write_params(op, k, v, k_pages, v_pages, slot_mapping)};
  check_same_device(op, {"q", q}, {{"k_pages", k_pages}});
  // What one half writes must be nothing that the other half reads or writes.
  for (const NamedTensor& turned : {NamedTensor{"q", q}, {"k", k}}) {
    check_disjoint(op, turned, {"v", v});
    check_disjoint(op, turned, {"slot_mapping", slot_mapping});
  }
  for (const NamedTensor& pages : {NamedTensor{"k_pages", k_pages}, {"v_pages", v_pages}}) {
    check_disjoint(op, pages, {"q", q});
    check_disjoint(op, pages, {"positions", positions});
    check_disjoint(op, pages, {"cos_sin", cos_sin});
  }
  if (params.rotary.num_tokens == 0) return;
  if (q.device.type == DeviceType::kCuda) {
#if ASTRAI_WITH_CUDA
    launch_rotary_kv_write_cuda(params, q.device.index, stream);
    return;
#else
    throw_cuda_not_built(op);
#endif
  }
  const cpu::CpuKernels& kernels = cpu::cpu_kernels();
  if (params.rotary.rotary_dim > 0) {
    count(counters().launches);
    kernels.rotary(params.rotary);
  }
  count(counters().launches);
  kernels.kv_write(params.kv);
}

}  // namespace astrai::kernels
