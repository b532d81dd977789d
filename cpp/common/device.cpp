#include "common/device.h"

#include <algorithm>
#include <string_view>

#include "common/check.h"

#if ASTRAI_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace astrai {

bool built_with_cuda() {
  return ASTRAI_WITH_CUDA != 0;
}

bool architecture_runs_on(const std::string& architecture, int compute_major, int compute_minor) {
  const int number = std::stoi(architecture);
  const bool exact = architecture.back() == 'a';
  const int minor = number % 10;
  return number / 10 == compute_major && (exact ? minor == compute_minor : minor <= compute_minor);
}

std::string missing_code_reason(const CudaDeviceFacts& device,
                                const std::vector<std::string>& architectures) {
  const auto runs = [&](const std::string& architecture) {
    return architecture_runs_on(architecture, device.compute_major, device.compute_minor);
  };
  if (std::any_of(architectures.begin(), architectures.end(), runs)) return "";
  std::string built;
  for (const std::string& architecture : architectures) {
    built += (built.empty() ? "" : ", ") + architecture;
  }
  return concat("this build has no code for ", device.name, " (compute capability ",
                device.compute_major, ".", device.compute_minor, "), only for architectures ",
                built, "; expected a build whose ASTRAI_CUDA_ARCHITECTURES includes ",
                device.compute_major, device.compute_minor);
}

#if ASTRAI_WITH_CUDA

std::vector<std::string> cuda_architectures() {
  std::vector<std::string> result;
  // As CMake joined them.
  constexpr std::string_view kSeparator = ", ";
  std::string_view rest = ASTRAI_CUDA_ARCHITECTURES;
  while (!rest.empty()) {
    const size_t end = std::min(rest.find(kSeparator), rest.size());
    result.emplace_back(rest.substr(0, end));
    rest.remove_prefix(std::min(end + kSeparator.size(), rest.size()));
  }
  return result;
}

std::string cuda_unavailable_reason(int index) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    cudaGetLastError();
    return concat("the driver reports no CUDA device (", cudaGetErrorName(status), ": ",
                  cudaGetErrorString(status), ")");
  }
  if (index < 0 || index >= count) {
    return concat("there is no CUDA device ", index, "; the driver reports ", count);
  }
  return missing_code_reason(cuda_device_facts(index), cuda_architectures());
}

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

std::vector<std::string> cuda_architectures() {
  return {};
}

std::string cuda_unavailable_reason(int) {
  return "this build of astrai has no CUDA kernels (it was configured without CUDA)";
}

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
