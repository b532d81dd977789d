// Table of the compiled CUDA prefill kernels, filled by one source per element type.
#pragma once

#include <cstdint>

#include "common/cuda_device.h"

namespace astrai::kernels {

struct PrefillKernel {
  KernelConfig config;  // of a kernel that takes one PrefillKernelParams
  int rows = 0;         // query rows of a tile
};

// A kernel for one architecture alone takes a field of its own here and its turn in choose_kernel.
struct PrefillKernelSet {
  PrefillKernel scalar;
  PrefillKernel narrow;  // tensor cores; null function for fp32
  PrefillKernel split;   // the same with the keys of a row over two groups of warps
  PrefillKernel wide;    // narrow with twice the rows; null for the largest head dims
};

// `general` for a mask, a softcap or a scale that is not positive: the tensor-core kernels of the
// rest do without the code for them. Null functions when head_dim is not supported.
PrefillKernelSet prefill_kernels_fp32(int64_t head_dim, bool general);
PrefillKernelSet prefill_kernels_fp16(int64_t head_dim, bool general);
PrefillKernelSet prefill_kernels_bf16(int64_t head_dim, bool general);

}  // namespace astrai::kernels
