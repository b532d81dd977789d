#include "kernels/attention/attn_decode_kernels.cuh"

namespace astrai::kernels {

DecodeKernelSet decode_kernels_bf16(int64_t head_dim) {
  return decode_kernels<__nv_bfloat16>(head_dim);
}

}  // namespace astrai::kernels
