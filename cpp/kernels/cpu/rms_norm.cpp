// Rows over threads; each row is read twice, the second time from cache.
#include "kernels/norm/rms_norm.h"

#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/parallel_rows.h"
#include "kernels/cpu/vec.h"
#include "kernels/cpu/vec_partial.h"

namespace astrai::kernels::cpu::ASTRAI_ISA {
namespace {

constexpr int64_t kLanes = VecF::kLanes;

template <class T>
float sum_of_squares(const T* row, int64_t num_columns) {
  // Four chains hide the latency of the multiply-add.
  VecF sums[4] = {vzero(), vzero(), vzero(), vzero()};
  int64_t i = 0;
  for (; i + 4 * kLanes <= num_columns; i += 4 * kLanes) {
    for (int chain = 0; chain < 4; ++chain) {
      const VecF value = vload(row + i + chain * kLanes);
      sums[chain] = vfma(value, value, sums[chain]);
    }
  }
  for (; i < num_columns; i += kLanes) {
    const int64_t left = num_columns - i;
    const VecF value = left >= kLanes ? vload(row + i) : vload_partial(row + i, left);
    sums[0] = vfma(value, value, sums[0]);
  }
  return vreduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// residual += x, rounded to T: the norm that follows sees the rounded sum, as the next layer will.
template <class T>
void add_to(T* residual, const T* x, int64_t num_columns) {
  int64_t i = 0;
  for (; i + kLanes <= num_columns; i += kLanes) {
    vstore(residual + i, vload(residual + i) + vload(x + i));
  }
  if (const int64_t left = num_columns - i; left > 0) {
    vstore_partial(residual + i, vload_partial(residual + i, left) + vload_partial(x + i, left),
                   left);
  }
}

template <class T>
void scale_row(T* out, const T* row, const T* weight, int64_t num_columns, float inverse_rms,
               float weight_offset) {
  const VecF scale = vset1(inverse_rms);
  const VecF offset = vset1(weight_offset);
  int64_t i = 0;
  for (; i + kLanes <= num_columns; i += kLanes) {
    vstore(out + i, vload(row + i) * scale * (vload(weight + i) + offset));
  }
  if (const int64_t left = num_columns - i; left > 0) {
    const VecF gain = vload_partial(weight + i, left) + offset;
    vstore_partial(out + i, vload_partial(row + i, left) * scale * gain, left);
  }
}

template <class T>
void rms_norm_rows(const RmsNormParams& params, int64_t first_row, int64_t last_row) {
  const int64_t num_columns = params.num_columns;
  for (int64_t t = first_row; t < last_row; ++t) {
    const T* row = static_cast<const T*>(params.x) + t * params.x_stride;
    if (params.residual != nullptr) {
      T* residual = static_cast<T*>(params.residual) + t * params.residual_stride;
      add_to(residual, row, num_columns);
      row = residual;
    }
    const float mean = sum_of_squares(row, num_columns) / static_cast<float>(num_columns);
    const float inverse_rms = 1.0f / __builtin_sqrtf(mean + params.eps);
    T* out = static_cast<T*>(params.out) + t * params.out_stride;
    scale_row(out, row, static_cast<const T*>(params.weight), num_columns, inverse_rms,
              params.weight_offset);
  }
}

}  // namespace

void rms_norm(const RmsNormParams& params) {
  const int64_t tensors = params.residual != nullptr ? 4 : 2;
  const int64_t bytes_per_row = params.num_columns * dtype_bytes(params.dtype) * tensors;
  dispatch_float_dtype(params.dtype, [&]<class T>() {
    parallel_rows(params.num_rows, bytes_per_row, [&](int64_t first_row, int64_t last_row) {
      rms_norm_rows<T>(params, first_row, last_row);
    });
  });
}

}  // namespace astrai::kernels::cpu::ASTRAI_ISA
