// RMSNorm with an optional fused residual addition (Zhang and Sennrich 2019, arXiv:1910.07467).
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/tensor_view.h"

namespace astrai::kernels {

// out[t] = h[t] / sqrt(mean(h[t]^2) + eps) * (weight_offset + weight), h = x, or the new residual.
struct RmsNormParams {
  const void* x = nullptr;       // [T, N], dtype
  void* residual = nullptr;      // nullable [T, N], dtype: becomes residual + x, rounded to dtype
  const void* weight = nullptr;  // [N], dtype
  void* out = nullptr;           // [T, N], dtype; may be x
  DType dtype = DType::kFloat32;
  int64_t num_rows = 0;     // T
  int64_t num_columns = 0;  // N
  int64_t x_stride = 0;     // of a row, in elements
  int64_t residual_stride = 0;
  int64_t out_stride = 0;
  float eps = 0.0f;
  float weight_offset = 0.0f;  // 1 for checkpoints that store weight - 1
};
static_assert(std::is_trivially_copyable_v<RmsNormParams>);

// x, residual and out are [..., N] with unit last stride and rows one fixed stride apart (2-D), all
// of one dtype. Throws std::invalid_argument when they are not, or when eps < 0.
void rms_norm(const TensorView& x, const TensorView& weight, const TensorView& out,
              const TensorView* residual, float eps, float weight_offset, void* stream);

}  // namespace astrai::kernels
