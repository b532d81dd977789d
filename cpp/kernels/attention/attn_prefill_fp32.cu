#include "kernels/attention/attn_prefill_kernels.cuh"

namespace astrai::kernels {

PrefillKernelSet prefill_kernels_fp32(int64_t head_dim, bool general) {
  return prefill_kernels<float>(head_dim, general);
}

}  // namespace astrai::kernels
