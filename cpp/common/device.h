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

// Architectures that this build has CUDA code for, such as "80" or "90a"; none without CUDA.
std::vector<std::string> cuda_architectures();

// CUDA devices that the driver reports; 0 when the build has no CUDA or no driver is installed.
int cuda_device_count();

// Throws std::runtime_error naming the reason when the build has no CUDA, std::invalid_argument
// when the index is out of range.
CudaDeviceFacts cuda_device_facts(int index);

// Whether machine code for an architecture runs on a device of this compute capability: on the same
// major number with at least the same minor one; with the suffix "a", whose instructions belong to
// one architecture, on exactly that one.
bool architecture_runs_on(const std::string& architecture, int compute_major, int compute_minor);

// Why code for these architectures cannot run on a device, naming both; empty when it can.
std::string missing_code_reason(const CudaDeviceFacts& device,
                                const std::vector<std::string>& architectures);

// Why no CUDA kernel of this build can run on device `index`; empty when they can. Fixed for the
// life of the process.
std::string cuda_unavailable_reason(int index);

// Throws std::runtime_error: "<op>: tensors are on cuda:0, but ...". Host entry points call it
// where a CUDA launch would go when none was built.
[[noreturn]] void throw_cuda_not_built(const char* op);

}  // namespace astrai
