// One block serves one token: it turns the query heads in place, turns the key heads and leaves
// them both in place and in the token's slot, and copies the values there.
#include "common/cuda_device.h"
#include "kernels/common/warp.cuh"
#include "kernels/kv_cache/kv_write.cuh"
#include "kernels/kv_cache/kv_write_align.h"
#include "kernels/rope/rotary.cuh"
#include "kernels/rope/rotary_align.h"
#include "kernels/rope/rotary_cuda_launch.h"

namespace astrai::kernels {
namespace {

template <class T, bool kInterleaved, int kPairs, int kVector>
__global__ void rotary_kv_write_kernel(const __grid_constant__ RotaryKvWriteParams params) {
  allow_next_grid();
  wait_for_previous_grid();
  const RotaryParams& rotary = params.rotary;
  const KvWriteParams& kv = params.kv;
  const int64_t token = blockIdx.x;
  const KvSlot slot = kv_slot(kv, token);
  const int rotary_dim = static_cast<int>(rotary.rotary_dim);
  const int head_dim = static_cast<int>(rotary.head_dim);
  const int num_kv_heads = static_cast<int>(rotary.num_kv_heads);
  T* k = static_cast<T*>(rotary.k) + token * rotary.k_stride_token;
  T* k_target = slot.valid ? static_cast<T*>(kv.k_pages) + slot.page * kv.k_pages_stride_page +
                                 slot.offset * kv.k_pages_stride_token
                           : nullptr;
  if (rotary_dim > 0) {
    const float* cos_sin = angles_of_token(rotary, token);
    turn_heads<T, kInterleaved, kPairs>(static_cast<T*>(rotary.q) + token * rotary.q_stride_token,
                                        rotary.q_stride_head, static_cast<int>(rotary.num_q_heads),
                                        nullptr, 0, cos_sin, rotary_dim);
    turn_heads<T, kInterleaved, kPairs>(k, rotary.k_stride_head, num_kv_heads, k_target,
                                        kv.k_pages_stride_head, cos_sin, rotary_dim);
  }
  if (!slot.valid) return;
  copy_heads<T, kVector>(k, rotary.k_stride_head, k_target, kv.k_pages_stride_head, num_kv_heads,
                         rotary_dim, head_dim);
  copy_heads<T, kVector>(static_cast<const T*>(kv.v) + token * kv.v_stride_token, kv.v_stride_head,
                         static_cast<T*>(kv.v_pages) + slot.page * kv.v_pages_stride_page +
                             slot.offset * kv.v_pages_stride_token,
                         kv.v_pages_stride_head, num_kv_heads, 0, head_dim);
}

template <class T, bool kInterleaved>
KernelConfig choose_kernel(const RotaryKvWriteParams& params) {
  constexpr int kPairs = kRotaryPairs<T, kInterleaved>;
  constexpr int kVector = 16 / static_cast<int>(sizeof(T));
  const bool aligned = rotary_rows_aligned(params.rotary) && kv_rows_aligned(params.kv) &&
                       params.rotary.rotary_dim % kVector == 0;
  const void* function =
      aligned
          ? reinterpret_cast<const void*>(&rotary_kv_write_kernel<T, kInterleaved, kPairs, kVector>)
          : reinterpret_cast<const void*>(&rotary_kv_write_kernel<T, kInterleaved, 1, 1>);
  const int64_t items =
      params.rotary.num_q_heads * (params.rotary.head_dim / 2 / (aligned ? kPairs : 1));
  return {.function = function, .name = "rotary_kv_write_kernel", .threads = threads_for(items)};
}

}  // namespace

void launch_rotary_kv_write_cuda(const RotaryKvWriteParams& params, int device, void* stream) {
  const CudaDeviceGuard guard(device);
  dispatch_float_dtype(params.rotary.dtype, [&]<class T>() {
    using Element = device_type<T>;
    const KernelConfig kernel = params.rotary.interleaved ? choose_kernel<Element, true>(params)
                                                          : choose_kernel<Element, false>(params);
    launch_kernel(kernel, {.x = static_cast<unsigned>(params.rotary.num_tokens)}, &params, device,
                  static_cast<cudaStream_t>(stream));
  });
}

}  // namespace astrai::kernels
