// Tokens over threads; heads of a token in order, since they share its row of the table.
#include "kernels/rope/rotary.h"

#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/parallel_rows.h"
#include "kernels/cpu/vec.h"
#include "kernels/cpu/vec_partial.h"

namespace astrai::kernels::cpu::ASTRAI_ISA {
namespace {

constexpr int64_t kLanes = VecF::kLanes;

// (x, y) turned by the angle of (cosine, sine). Written with explicit multiply-adds, so that whole
// vectors and tails round alike.
void turn(VecF& x, VecF& y, VecF cosine, VecF sine) {
  const VecF turned_x = vfma(x, cosine, (vzero() - y) * sine);
  y = vfma(y, cosine, x * sine);
  x = turned_x;
}

// Pairs (i, i + half).
template <class T>
void turn_half_split(T* head, const float* cosines, const float* sines, int64_t half) {
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    VecF x = vload(head + i);
    VecF y = vload(head + half + i);
    turn(x, y, vload(cosines + i), vload(sines + i));
    vstore(head + i, x);
    vstore(head + half + i, y);
  }
  if (const int64_t left = half - i; left > 0) {
    VecF x = vload_partial(head + i, left);
    VecF y = vload_partial(head + half + i, left);
    turn(x, y, vload_partial(cosines + i, left), vload_partial(sines + i, left));
    vstore_partial(head + i, x, left);
    vstore_partial(head + half + i, y, left);
  }
}

// Pairs (2i, 2i + 1).
template <class T>
void turn_interleaved(T* head, const float* cosines, const float* sines, int64_t half) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t count = half - i < kLanes ? half - i : kLanes;
    T evens[kLanes] = {};
    T odds[kLanes] = {};
    for (int64_t pair = 0; pair < count; ++pair) {
      evens[pair] = head[2 * (i + pair)];
      odds[pair] = head[2 * (i + pair) + 1];
    }
    VecF x = vload(evens);
    VecF y = vload(odds);
    turn(x, y, vload_partial(cosines + i, count), vload_partial(sines + i, count));
    vstore(evens, x);
    vstore(odds, y);
    for (int64_t pair = 0; pair < count; ++pair) {
      head[2 * (i + pair)] = evens[pair];
      head[2 * (i + pair) + 1] = odds[pair];
    }
  }
}

template <class T>
void turn_heads(T* token, int64_t num_heads, int64_t stride_head, const float* table_row,
                const RotaryParams& params) {
  const int64_t half = params.rotary_dim / 2;
  for (int64_t h = 0; h < num_heads; ++h) {
    T* head = token + h * stride_head;
    if (params.interleaved) {
      turn_interleaved(head, table_row, table_row + half, half);
    } else {
      turn_half_split(head, table_row, table_row + half, half);
    }
  }
}

int64_t position_of(const RotaryParams& params, int64_t token) {
  if (params.positions_are_int64) return static_cast<const int64_t*>(params.positions)[token];
  return static_cast<const int32_t*>(params.positions)[token];
}

}  // namespace

void rotary(const RotaryParams& params) {
  const int64_t num_heads = params.num_q_heads + params.num_kv_heads;
  const int64_t bytes_per_token = 2 * num_heads * params.rotary_dim * dtype_bytes(params.dtype);
  dispatch_float_dtype(params.dtype, [&]<class T>() {
    parallel_rows(params.num_tokens, bytes_per_token, [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; ++t) {
        const float* table_row = params.cos_sin + position_of(params, t) * params.cos_sin_stride;
        turn_heads(static_cast<T*>(params.q) + t * params.q_stride_token, params.num_q_heads,
                   params.q_stride_head, table_row, params);
        turn_heads(static_cast<T*>(params.k) + t * params.k_stride_token, params.num_kv_heads,
                   params.k_stride_head, table_row, params);
      }
    });
  });
}

}  // namespace astrai::kernels::cpu::ASTRAI_ISA
