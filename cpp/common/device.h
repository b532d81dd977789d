// Facts about the build and the devices that it can see. Nothing here creates a CUDA context.
#pragma once

#include <string>
#include <vector>

namespace astrai {

struct CudaDeviceFacts {
  std::string name;
  int compute_major = 0;
  int compute_minor = 0;
  int num_sms = 0;
  int64_t total_memory_bytes = 0;
};

// True when this build was configured with CUDA kernels.
bool built_with_cuda();

// CUDA devices that the driver reports; 0 when the build has no CUDA or no driver is installed.
int cuda_device_count();

// Throws std::runtime_error naming the reason when the build has no CUDA, std::invalid_argument
// when the index is out of range.
CudaDeviceFacts cuda_device_facts(int index);

// Throws std::runtime_error: "<op>: tensors are on cuda:0, but ...". Host entry points call it
// where a CUDA launch would go when none was built.
[[noreturn]] void throw_cuda_not_built(const char* op);

}  // namespace astrai
