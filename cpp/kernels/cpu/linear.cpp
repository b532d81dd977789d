// Weight rows over threads; inputs are widened to float32 once and shared. See linear_tile.h for
// the order of sums, which makes each row of the result independent of the others.
//
// A task takes a panel of weight rows that fits the second-level cache. Within it, a chunk of input
// rows meets one group of weight rows after the other, so weights come from memory once, when the
// first chunk asks for them, and the next group is prefetched meanwhile.
#include "kernels/linear/linear.h"

#include "common/thread_pool.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/linear_tile.h"
#include "kernels/cpu/parallel_rows.h"
#include "kernels/cpu/vec_partial.h"

namespace astrai::kernels::cpu::ASTRAI_ISA {
namespace {

constexpr int64_t kChunkRows = 12;
constexpr int64_t kMaxPanelOutputs = 20 * kGroupOutputs;

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

// Results of a chunk of input rows times a panel of weight rows, on their way out.
struct PanelResults {
  float values[kChunkRows][kMaxPanelOutputs];
};

// out[m, first_output + n] = results[n] + bias[first_output + n]
template <class W, class Out>
void store_row(const LinearParams& params, int64_t m, int64_t first_output, int64_t count,
               const float* results) {
  Out* out = static_cast<Out*>(params.out) + m * params.out_stride + first_output;
  const W* bias =
      params.bias == nullptr ? nullptr : static_cast<const W*>(params.bias) + first_output;
  for (int64_t n = 0; n < count; n += VecF::kLanes) {
    const int64_t left = count - n;
    if (left >= VecF::kLanes) {
      const VecF value = vload(results + n);
      vstore(out + n, bias == nullptr ? value : value + vload(bias + n));
    } else {
      const VecF value = vload_partial(results + n, left);
      vstore_partial(out + n, bias == nullptr ? value : value + vload_partial(bias + n, left),
                     left);
    }
  }
}

template <class W, int R, int M>
void compute_tile(const LinearParams& params, const PackedInputs& inputs, int64_t m, int64_t n,
                  Prefetch prefetch, float* results) {
  const W* weight = static_cast<const W*>(params.weight) + n * params.weight_stride;
  float dots[(R * M + 3) / 4 * 4];
  dot_tile<W, R, M>(weight, params.weight_stride, inputs.data + m * inputs.stride, inputs.stride,
                    params.num_inputs, prefetch, dots);
  for (int i = 0; i < M; ++i) {
    for (int r = 0; r < R; ++r) results[i * kMaxPanelOutputs + r] = dots[i * R + r];
  }
}

// M input rows from m times the `count` weight rows from n; count <= kGroupOutputs.
template <class W, int M>
void compute_group(const LinearParams& params, const PackedInputs& inputs, int64_t m, int64_t n,
                   int64_t count, Prefetch prefetch, float* results) {
  constexpr int kOutputs = kTileOutputs[M];
  static_assert(kGroupOutputs % kOutputs == 0);
  const int64_t num_tiles = count / kOutputs;
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const int64_t done = tile * kOutputs;
    compute_tile<W, kOutputs, M>(params, inputs, m, n + done, prefetch.part(tile, num_tiles),
                                 results + done);
  }
  for (int64_t done = num_tiles * kOutputs; done < count; ++done) {
    compute_tile<W, 1, M>(params, inputs, m, n + done, {}, results + done);
  }
}

// Input rows of the next tile when `left` are to be done.
int64_t next_tile_rows(int64_t left) {
  if (left <= kMaxTileRows) return left;
  if (left > 2 * kMaxTileRows || kFullTileRows < kMaxTileRows) return kFullTileRows;
  return (left + 1) / 2;
}

template <class W>
void compute_tile_rows(int64_t tile_rows, const LinearParams& params, const PackedInputs& inputs,
                       int64_t m, int64_t n, int64_t count, Prefetch prefetch, float* results) {
  static constexpr decltype(&compute_group<W, 1>) kCompute[kMaxTileRows] = {
      compute_group<W, 1>, compute_group<W, 2>, compute_group<W, 3>, compute_group<W, 4>};
  kCompute[tile_rows - 1](params, inputs, m, n, count, prefetch, results);
}

// The group of weight rows after the one from n. Rows longer than kLongRow are left to the
// hardware, which follows each by itself; rows with wide gaps between them too.
Prefetch group_after(const LinearParams& params, int64_t n) {
  constexpr int64_t kLongRow = 12 * 1024;
  const int64_t item = dtype_bytes(params.weight_dtype);
  const int64_t row_bytes = params.num_inputs * item;
  const int64_t stride_bytes = params.weight_stride * item;
  const int64_t next = n + kGroupOutputs;
  const bool dense = stride_bytes >= row_bytes && stride_bytes <= row_bytes + row_bytes / 4;
  if (next >= params.num_outputs || !dense || row_bytes > kLongRow) return {};
  return {.address = reinterpret_cast<uintptr_t>(params.weight) +
                     static_cast<uintptr_t>(next * stride_bytes),
          .bytes = kGroupOutputs * stride_bytes};
}

template <class W>
void compute_chunk(const LinearParams& params, const PackedInputs& inputs, int64_t first_row,
                   int64_t last_row, int64_t first_output, int64_t last_output,
                   PanelResults& results) {
  int64_t num_tiles = 0;
  for (int64_t m = first_row; m < last_row; m += next_tile_rows(last_row - m)) ++num_tiles;
  for (int64_t n = first_output; n < last_output; n += kGroupOutputs) {
    const int64_t count = last_output - n < kGroupOutputs ? last_output - n : kGroupOutputs;
    // Only the first rows to meet a group find it in memory rather than in cache.
    const Prefetch next_group = first_row == 0 ? group_after(params, n) : Prefetch{};
    int64_t m = first_row;
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      const int64_t tile_rows = next_tile_rows(last_row - m);
      compute_tile_rows<W>(tile_rows, params, inputs, m, n, count, next_group.part(tile, num_tiles),
                           results.values[m - first_row] + (n - first_output));
      m += tile_rows;
    }
  }
}

template <class W>
void compute_panel(const LinearParams& params, const PackedInputs& inputs, int64_t first_output,
                   int64_t last_output) {
  PanelResults results;
  for (int64_t first_row = 0; first_row < params.num_rows; first_row += kChunkRows) {
    const int64_t left = params.num_rows - first_row;
    const int64_t last_row = first_row + (left < kChunkRows ? left : kChunkRows);
    compute_chunk<W>(params, inputs, first_row, last_row, first_output, last_output, results);
    for (int64_t m = first_row; m < last_row; ++m) {
      dispatch_float_dtype(params.out_dtype, [&]<class Out>() {
        store_row<W, Out>(params, m, first_output, last_output - first_output,
                          results.values[m - first_row]);
      });
    }
  }
}

// Weight rows of a task: whole groups; few enough that threads which start late still find work;
// and, when they are to be read more than once, what stays in the second-level cache meanwhile.
int64_t panel_outputs(const LinearParams& params) {
  constexpr int64_t kPanelBytes = 128 * 1024;
  int64_t outputs = params.num_outputs / (4 * int64_t{num_threads()});
  if (outputs > kMaxPanelOutputs) outputs = kMaxPanelOutputs;
  if (params.num_rows > kChunkRows) {
    const int64_t cached = kPanelBytes / (params.num_inputs * dtype_bytes(params.weight_dtype) + 1);
    if (outputs > cached) outputs = cached;
  }
  outputs = outputs / kGroupOutputs * kGroupOutputs;
  return outputs > kGroupOutputs ? outputs : kGroupOutputs;
}

}  // namespace

void linear(const LinearParams& params) {
  dispatch_float_dtype(params.weight_dtype, [&]<class W>() {
    const PackedInputs inputs = pack_inputs<W>(params);
    const int64_t panel = panel_outputs(params);
    const int64_t num_panels = (params.num_outputs + panel - 1) / panel;
    const auto compute = [&](int64_t task) {
      const int64_t first = task * panel;
      const int64_t last = first + panel < params.num_outputs ? first + panel : params.num_outputs;
      compute_panel<W>(params, inputs, first, last);
    };
    // Less work than waking a second thread is worth.
    constexpr int64_t kSerialProducts = 64 * 1024;
    if (params.num_rows * params.num_outputs * params.num_inputs < kSerialProducts) {
      for (int64_t task = 0; task < num_panels; ++task) compute(task);
    } else {
      parallel_for(num_panels, compute);
    }
  });
}

}  // namespace astrai::kernels::cpu::ASTRAI_ISA
