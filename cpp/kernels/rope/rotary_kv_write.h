// Rotary embedding of q and k, and the write of the turned keys and of the values into the paged
// cache, in one pass over the new tokens.
#pragma once

#include <type_traits>

#include "common/tensor_view.h"
#include "kernels/kv_cache/kv_write.h"
#include "kernels/rope/rotary.h"

namespace astrai::kernels {

// rotary.k and kv.k are the same tensor; its rows are left turned, as rotary leaves them.
struct RotaryKvWriteParams {
  RotaryParams rotary;
  KvWriteParams kv;
};
static_assert(std::is_trivially_copyable_v<RotaryKvWriteParams>);

// The same as rotary(q, &k, positions, cos_sin, interleaved) and then kv_write(k, v, k_pages,
// v_pages, slot_mapping), on either device. Throws std::invalid_argument as they do, before
// anything is touched.
void rotary_kv_write(const TensorView& q, const TensorView& k, const TensorView& v,
                     const TensorView& positions, const TensorView& cos_sin, bool interleaved,
                     const TensorView& k_pages, const TensorView& v_pages,
                     const TensorView& slot_mapping, void* stream);

}  // namespace astrai::kernels
