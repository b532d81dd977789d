// One block turns all heads of one token.
#include "common/cuda_device.h"
#include "kernels/common/warp.cuh"
#include "kernels/rope/rotary.cuh"
#include "kernels/rope/rotary_align.h"
#include "kernels/rope/rotary_cuda_launch.h"

namespace astrai::kernels {
namespace {

template <class T, bool kInterleaved, int kPairs>
__global__ void rotary_kernel(const __grid_constant__ RotaryParams params) {
  allow_next_grid();
  wait_for_previous_grid();
  const int64_t token = blockIdx.x;
  const float* cos_sin = angles_of_token(params, token);
  const int rotary_dim = static_cast<int>(params.rotary_dim);
  turn_heads<T, kInterleaved, kPairs>(static_cast<T*>(params.q) + token * params.q_stride_token,
                                      params.q_stride_head, static_cast<int>(params.num_q_heads),
                                      nullptr, 0, cos_sin, rotary_dim);
  if (params.k != nullptr) {
    turn_heads<T, kInterleaved, kPairs>(static_cast<T*>(params.k) + token * params.k_stride_token,
                                        params.k_stride_head, static_cast<int>(params.num_kv_heads),
                                        nullptr, 0, cos_sin, rotary_dim);
  }
}

template <class T, bool kInterleaved>
KernelConfig choose_kernel(const RotaryParams& params) {
  constexpr int kPairs = kRotaryPairs<T, kInterleaved>;
  const bool aligned = rotary_rows_aligned(params);
  const void* function =
      aligned ? reinterpret_cast<const void*>(&rotary_kernel<T, kInterleaved, kPairs>)
              : reinterpret_cast<const void*>(&rotary_kernel<T, kInterleaved, 1>);
  const int64_t items = params.num_q_heads * (params.rotary_dim / 2 / (aligned ? kPairs : 1));
  return {.function = function, .name = "rotary_kernel", .threads = threads_for(items)};
}

}  // namespace

void launch_rotary_cuda(const RotaryParams& params, int device, void* stream) {
  const CudaDeviceGuard guard(device);
  dispatch_float_dtype(params.dtype, [&]<class T>() {
    using Element = device_type<T>;
    const KernelConfig kernel = params.interleaved ? choose_kernel<Element, true>(params)
                                                   : choose_kernel<Element, false>(params);
    launch_kernel(kernel, {.x = static_cast<unsigned>(params.num_tokens)}, &params, device,
                  static_cast<cudaStream_t>(stream));
  });
}

}  // namespace astrai::kernels
