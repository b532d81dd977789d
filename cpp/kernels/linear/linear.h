// y = x W^T + b for weights stored as float32, float16 or bfloat16; sums are float32.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/tensor_view.h"

namespace astrai::kernels {

struct LinearParams {
  const void* x = nullptr;          // [M, K], x_dtype
  const void* weight = nullptr;     // [N, K], weight_dtype
  const void* bias = nullptr;       // nullable [N], weight_dtype
  void* out = nullptr;              // [M, N], out_dtype
  DType x_dtype = DType::kFloat32;  // weight_dtype or float32
  DType weight_dtype = DType::kFloat32;
  DType out_dtype = DType::kFloat32;  // x_dtype or float32 (logits)
  int64_t num_rows = 0;               // M
  int64_t num_outputs = 0;            // N
  int64_t num_inputs = 0;             // K
  int64_t x_stride = 0;               // of a row, in elements
  int64_t weight_stride = 0;
  int64_t out_stride = 0;
};
static_assert(std::is_trivially_copyable_v<LinearParams>);

// Throws std::invalid_argument when a shape, dtype or stride differs from the above.
void linear(const TensorView& x, const TensorView& weight, const TensorView* bias,
            const TensorView& out, void* stream);

}  // namespace astrai::kernels
