// Checks of CUDA calls. Only sources compiled with CUDA include this.
#pragma once

#include <cuda_runtime_api.h>

#include "common/check.h"

namespace astrai::detail {

// Throws std::runtime_error "<what>: <error name> (<text>) at <file>:<line>" and clears the error,
// so that a recoverable one does not surface again in an unrelated call.
[[noreturn]] inline void throw_cuda_error(const char* what, cudaError_t status, const char* file,
                                          int line) {
  cudaGetLastError();
  throw std::runtime_error(concat(what, ": ", cudaGetErrorName(status), " (",
                                  cudaGetErrorString(status), ") at ", file, ":", line));
}

}  // namespace astrai::detail

// The call's own text names it in the message.
#define ASTRAI_CHECK_CUDA(call)                                                     \
  do {                                                                              \
    const cudaError_t astrai_status = (call);                                       \
    if (astrai_status != cudaSuccess) [[unlikely]] {                                \
      ::astrai::detail::throw_cuda_error(#call, astrai_status, __FILE__, __LINE__); \
    }                                                                               \
  } while (false)
