// Rows over threads.
#include "kernels/activation/silu_mul.h"

#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/parallel_rows.h"
#include "kernels/cpu/vec.h"
#include "kernels/cpu/vec_partial.h"

namespace astrai::kernels::cpu::ASTRAI_ISA {
namespace {

constexpr int64_t kLanes = VecF::kLanes;

// x / (1 + exp(-x)), by way of exp(-|x|) <= 1, which can only underflow: with exp(-x) clamped below
// infinity a hugely negative x would not go to zero.
VecF silu(VecF x) {
  const VecF one = vset1(1.0f);
  const VecF decay = vexp(vmin(x, vzero() - x));
  const VecF numerator = vselect_lt(x, vzero(), decay, one);
  return x * (numerator / (one + decay));
}

template <class T>
void silu_mul_row(const T* gate, const T* up, T* out, int64_t num_columns) {
  int64_t i = 0;
  for (; i + kLanes <= num_columns; i += kLanes) {
    vstore(out + i, silu(vload(gate + i)) * vload(up + i));
  }
  if (const int64_t left = num_columns - i; left > 0) {
    const VecF activated = silu(vload_partial(gate + i, left));
    vstore_partial(out + i, activated * vload_partial(up + i, left), left);
  }
}

}  // namespace

void silu_mul(const SiluMulParams& params) {
  // An exponential and a division cost several times what moving the bytes does.
  constexpr int64_t kRelativeCost = 4;
  const int64_t bytes_per_row = 3 * params.num_columns * dtype_bytes(params.dtype) * kRelativeCost;
  dispatch_float_dtype(params.dtype, [&]<class T>() {
    parallel_rows(params.num_rows, bytes_per_row, [&](int64_t first_row, int64_t last_row) {
      for (int64_t t = first_row; t < last_row; ++t) {
        const T* gate = static_cast<const T*>(params.gate_up) + t * params.gate_up_stride;
        T* out = static_cast<T*>(params.out) + t * params.out_stride;
        silu_mul_row(gate, gate + params.num_columns, out, params.num_columns);
      }
    });
  });
}

}  // namespace astrai::kernels::cpu::ASTRAI_ISA
