#include "common/device.h"

#include "common/check.h"

#if ASTRAI_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace astrai {

bool built_with_cuda() {
  return ASTRAI_WITH_CUDA != 0;
}

#if ASTRAI_WITH_CUDA

int cuda_device_count() {
  int count = 0;
  // No driver or no device is an ordinary answer here, not a failure: the count is then zero.
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return count;
}

CudaDeviceFacts cuda_device_facts(int index) {
  const int count = cuda_device_count();
  ASTRAI_CHECK_ARG(index >= 0 && index < count, "cuda_device_facts: index ", index,
                   "; expected one of the ", count, " devices that the driver reports");
  cudaDeviceProp properties;
  const cudaError_t status = cudaGetDeviceProperties(&properties, index);
  ASTRAI_CHECK_STATE(status == cudaSuccess, "cuda_device_facts: cudaGetDeviceProperties failed: ",
                     cudaGetErrorString(status));
  return {.name = properties.name,
          .compute_major = properties.major,
          .compute_minor = properties.minor,
          .num_sms = properties.multiProcessorCount,
          .total_memory_bytes = static_cast<int64_t>(properties.totalGlobalMem)};
}

#else

int cuda_device_count() {
  return 0;
}

CudaDeviceFacts cuda_device_facts(int) {
  throw std::runtime_error(
      "cuda_device_facts: this build has no CUDA; expected a build with ASTRAI_CUDA=ON");
}

#endif

void throw_cuda_not_built(const char* op) {
  throw std::runtime_error(
      concat(op,
             ": tensors are on a CUDA device, but this build has no CUDA kernel for it; "
             "expected CPU tensors, or a build whose CUDA kernels include this operation"));
}

}  // namespace astrai
