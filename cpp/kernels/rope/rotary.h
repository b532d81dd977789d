// Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in place on q and k.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/tensor_view.h"

namespace astrai::kernels {

// R is the rotary width: pair i turns by the angle of cos_sin[position, i]. Half-split pairs lanes
// (i, i + R/2), interleaved (2i, 2i + 1). Lanes from R to D keep their bits.
struct RotaryParams {
  void* q = nullptr;                // [T, Hq, D], dtype
  void* k = nullptr;                // nullable [T, Hkv, D], dtype
  const void* positions = nullptr;  // [T] int32 or int64, in [0, max_position)
  const float* cos_sin = nullptr;   // [max_position, R]: cosines, then sines
  DType dtype = DType::kFloat32;
  bool positions_are_int64 = false;
  bool interleaved = false;
  int64_t num_tokens = 0;  // T
  int64_t num_q_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;    // D
  int64_t rotary_dim = 0;  // R, even, <= D
  int64_t max_position = 0;
  int64_t q_stride_token = 0, q_stride_head = 0;
  int64_t k_stride_token = 0, k_stride_head = 0;
  int64_t cos_sin_stride = 0;
};
static_assert(std::is_trivially_copyable_v<RotaryParams>);

// Throws std::invalid_argument when a shape, dtype or stride differs from the above; on the CPU
// also when a position lies outside the table, before anything is turned.
void rotary(const TensorView& q, const TensorView* k, const TensorView& positions,
            const TensorView& cos_sin, bool interleaved, void* stream);

// The checks of rotary and the parameters of its kernels; `op` starts the error texts.
RotaryParams pack_rotary_params(const char* op, const TensorView& q, const TensorView* k,
                                const TensorView& positions, const TensorView& cos_sin,
                                bool interleaved);

}  // namespace astrai::kernels
