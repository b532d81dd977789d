// CUDA side of kv_write, in plain C++.
#pragma once

#include "kernels/kv_cache/kv_write.h"

namespace astrai::kernels {

// Checked parameters in; `device` is the CUDA device index of all tensors, `stream` a cudaStream_t.
// A slot outside the cache is skipped like -1: the host cannot read it. Throws std::runtime_error
// when CUDA fails.
void launch_kv_write_cuda(const KvWriteParams& params, int device, void* stream);

}  // namespace astrai::kernels
