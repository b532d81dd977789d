#include "kernels/attention/attn_decode_kernels.cuh"

namespace astrai::kernels {

DecodeKernelSet decode_kernels_fp16(int64_t head_dim) {
  return decode_kernels<__half>(head_dim);
}

}  // namespace astrai::kernels
