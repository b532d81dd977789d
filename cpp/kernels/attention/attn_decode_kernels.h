// Table of the compiled CUDA decode kernels, filled by one source per element type.
#pragma once

#include <cstdint>

#include "common/cuda_device.h"

namespace astrai::kernels {

struct DecodeKernel {
  KernelConfig config;      // of a kernel that takes one DecodeKernelParams
  int rows = 0;             // query heads of a block
  int block_tile_keys = 0;  // keys that a block takes in one round of its warps
};

struct DecodeKernelSet {
  DecodeKernel scalar;
  DecodeKernel narrow;  // tensor cores; null function for fp32
  DecodeKernel
      wide;  // the same with twice the warps; null for small head dims, may not fit a device
  KernelConfig combine;
};

// Null functions when head_dim is not supported.
DecodeKernelSet decode_kernels_fp32(int64_t head_dim);
DecodeKernelSet decode_kernels_fp16(int64_t head_dim);
DecodeKernelSet decode_kernels_bf16(int64_t head_dim);

}  // namespace astrai::kernels
