// Weight rows over threads; inputs are widened to float32 once and shared. See linear_tile.h for
// the order of sums, which makes each row of the result independent of the others.
#include "kernels/linear/linear.h"

#include "common/thread_pool.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/linear_tile.h"
#include "kernels/cpu/parallel_rows.h"

namespace astrai::kernels::cpu::ASTRAI_ISA {
namespace {

struct PackedInputs {
  const float* data;
  int64_t stride;  // of a row, in floats: K rounded up to whole blocks
};

template <class W>
void pack_rows(const LinearParams& params, float* packed, int64_t stride, int64_t first,
               int64_t last) {
  dispatch_float_dtype(params.x_dtype, [&]<class X>() {
    if constexpr (dtype_of<X>::value == dtype_of<W>::value ||
                  dtype_of<X>::value == DType::kFloat32) {
      for (int64_t m = first; m < last; ++m) {
        const X* row = static_cast<const X*>(params.x) + m * params.x_stride;
        pack_input<W>(row, params.num_inputs, packed + m * stride);
      }
    }
  });
}

template <class W>
PackedInputs pack_inputs(const LinearParams& params) {
  const int64_t stride = (params.num_inputs + kBlock - 1) / kBlock * kBlock;
  auto* packed = static_cast<float*>(
      thread_scratch(static_cast<size_t>(params.num_rows * stride) * sizeof(float)));
  parallel_rows(
      params.num_rows, 2 * stride * int64_t{sizeof(float)},
      [&](int64_t first, int64_t last) { pack_rows<W>(params, packed, stride, first, last); });
  return {.data = packed, .stride = stride};
}

// out[m, n] = dot + bias[n]
template <class W>
void store_output(const LinearParams& params, int64_t m, int64_t n, float dot) {
  if (params.bias != nullptr) dot += to_float(static_cast<const W*>(params.bias)[n]);
  const int64_t index = m * params.out_stride + n;
  dispatch_float_dtype(params.out_dtype, [&]<class Out>() {
    static_cast<Out*>(params.out)[index] = from_float<Out>(dot);
  });
}

template <class W, int R, int M>
void compute_tile(const LinearParams& params, const PackedInputs& inputs, int64_t m, int64_t n) {
  const W* weight = static_cast<const W*>(params.weight) + n * params.weight_stride;
  float dots[R][M];
  dot_tile<W, R, M>(weight, params.weight_stride, inputs.data + m * inputs.stride, inputs.stride,
                    params.num_inputs, dots);
  for (int i = 0; i < M; ++i) {
    for (int r = 0; r < R; ++r) store_output<W>(params, m + i, n + r, dots[r][i]);
  }
}

template <class W, int M>
void compute_outputs(const LinearParams& params, const PackedInputs& inputs, int64_t m,
                     int64_t first_output, int64_t last_output) {
  constexpr int kOutputs = tile_outputs(M);
  int64_t n = first_output;
  for (; n + kOutputs <= last_output; n += kOutputs) {
    compute_tile<W, kOutputs, M>(params, inputs, m, n);
  }
  for (; n < last_output; ++n) compute_tile<W, 1, M>(params, inputs, m, n);
}

template <class W>
void compute_panel(const LinearParams& params, const PackedInputs& inputs, int64_t first_output,
                   int64_t last_output) {
  static_assert(kMaxTileRows == 4);
  int64_t m = 0;
  for (; m + 4 <= params.num_rows; m += 4) {
    compute_outputs<W, 4>(params, inputs, m, first_output, last_output);
  }
  switch (params.num_rows - m) {
    case 3:
      return compute_outputs<W, 3>(params, inputs, m, first_output, last_output);
    case 2:
      return compute_outputs<W, 2>(params, inputs, m, first_output, last_output);
    case 1:
      return compute_outputs<W, 1>(params, inputs, m, first_output, last_output);
    default:
      return;
  }
}

// Weight rows that one task takes: at most what stays in the second-level cache while the input
// rows pass by, and few enough that every thread gets some.
int64_t panel_outputs(const LinearParams& params) {
  constexpr int64_t kPanelBytes = 128 * 1024;
  constexpr int64_t kRounding = 24;  // a multiple of most tile heights
  const int64_t row_bytes = params.num_inputs * dtype_bytes(params.weight_dtype) + 1;
  int64_t outputs = kPanelBytes / row_bytes;
  const int64_t fair_share = params.num_outputs / (4 * int64_t{num_threads()});
  if (outputs > fair_share) outputs = fair_share;
  outputs = outputs / kRounding * kRounding;
  return outputs > kRounding ? outputs : kRounding;
}

}  // namespace

void linear(const LinearParams& params) {
  dispatch_float_dtype(params.weight_dtype, [&]<class W>() {
    const PackedInputs inputs = pack_inputs<W>(params);
    const int64_t panel = panel_outputs(params);
    parallel_for((params.num_outputs + panel - 1) / panel, [&](int64_t task) {
      const int64_t first = task * panel;
      const int64_t last = first + panel < params.num_outputs ? first + panel : params.num_outputs;
      compute_panel<W>(params, inputs, first, last);
    });
  });
}

}  // namespace astrai::kernels::cpu::ASTRAI_ISA
