// CUDA side of rotary and rotary_kv_write, in plain C++.
#pragma once

#include "kernels/rope/rotary.h"
#include "kernels/rope/rotary_kv_write.h"

namespace astrai::kernels {

// Checked parameters in; `device` is the CUDA device index of all tensors, `stream` a cudaStream_t.
// Positions outside the table are undefined behaviour. Throws std::runtime_error when CUDA fails.
void launch_rotary_cuda(const RotaryParams& params, int device, void* stream);
void launch_rotary_kv_write_cuda(const RotaryKvWriteParams& params, int device, void* stream);

}  // namespace astrai::kernels
