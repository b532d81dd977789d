// The gate of a SwiGLU feed-forward layer (Shazeer 2020, arXiv:2002.05202).
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/tensor_view.h"

namespace astrai::kernels {

// out[t, i] = silu(gate_up[t, i]) * gate_up[t, N + i]
struct SiluMulParams {
  const void* gate_up = nullptr;  // [T, 2 * N], dtype
  void* out = nullptr;            // [T, N], dtype
  DType dtype = DType::kFloat32;
  int64_t num_rows = 0;        // T
  int64_t num_columns = 0;     // N
  int64_t gate_up_stride = 0;  // of a row, in elements
  int64_t out_stride = 0;
};
static_assert(std::is_trivially_copyable_v<SiluMulParams>);

// Throws std::invalid_argument when a shape, dtype or stride differs from the above.
void silu_mul(const TensorView& gate_up, const TensorView& out, void* stream);

}  // namespace astrai::kernels
