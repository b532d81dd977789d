// One block copies all heads of one token. The element type matters only for its size.
#include "common/cuda_device.h"
#include "kernels/common/warp.cuh"
#include "kernels/kv_cache/kv_write.cuh"
#include "kernels/kv_cache/kv_write_align.h"
#include "kernels/kv_cache/kv_write_cuda_launch.h"
#include "kernels/rope/rotary_align.h"

namespace astrai::kernels {
namespace {

template <class T, int kVector>
__global__ void kv_write_kernel(const __grid_constant__ KvWriteParams params) {
  allow_next_grid();
  wait_for_previous_grid();
  const int64_t token = blockIdx.x;
  const KvSlot slot = kv_slot(params, token);
  if (!slot.valid) return;
  const int num_heads = static_cast<int>(params.num_kv_heads);
  const int head_dim = static_cast<int>(params.head_dim);
  copy_heads<T, kVector>(static_cast<const T*>(params.k) + token * params.k_stride_token,
                         params.k_stride_head,
                         static_cast<T*>(params.k_pages) + slot.page * params.k_pages_stride_page +
                             slot.offset * params.k_pages_stride_token,
                         params.k_pages_stride_head, num_heads, 0, head_dim);
  copy_heads<T, kVector>(static_cast<const T*>(params.v) + token * params.v_stride_token,
                         params.v_stride_head,
                         static_cast<T*>(params.v_pages) + slot.page * params.v_pages_stride_page +
                             slot.offset * params.v_pages_stride_token,
                         params.v_pages_stride_head, num_heads, 0, head_dim);
}

template <class T>
KernelConfig choose_kernel(const KvWriteParams& params) {
  constexpr int kVector = 16 / static_cast<int>(sizeof(T));
  const bool aligned = kv_rows_aligned(params);
  return {.function = aligned ? reinterpret_cast<const void*>(&kv_write_kernel<T, kVector>)
                              : reinterpret_cast<const void*>(&kv_write_kernel<T, 1>),
          .name = "kv_write_kernel",
          .threads = threads_for(params.num_kv_heads * params.head_dim / (aligned ? kVector : 1))};
}

}  // namespace

void launch_kv_write_cuda(const KvWriteParams& params, int device, void* stream) {
  const CudaDeviceGuard guard(device);
  const KernelConfig kernel = dtype_bytes(params.dtype) == 4 ? choose_kernel<uint32_t>(params)
                                                             : choose_kernel<uint16_t>(params);
  launch_kernel(kernel, {.x = static_cast<unsigned>(params.num_tokens)}, &params, device,
                static_cast<cudaStream_t>(stream));
}

}  // namespace astrai::kernels
