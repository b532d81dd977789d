// Writes new keys and values into their slots of a paged cache.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/tensor_view.h"

namespace astrai::kernels {

// Token t goes to page slot / S, offset slot % S; a slot of -1 is skipped.
struct KvWriteParams {
  const void* k = nullptr;  // [T, Hkv, D], dtype
  const void* v = nullptr;
  void* k_pages = nullptr;  // [P, S, Hkv, D], dtype
  void* v_pages = nullptr;
  const int64_t* slot_mapping = nullptr;  // [T]
  DType dtype = DType::kFloat32;
  int64_t num_tokens = 0;  // T
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t num_pages = 0;
  int64_t page_size = 0;
  int64_t k_stride_token = 0, k_stride_head = 0;
  int64_t v_stride_token = 0, v_stride_head = 0;
  int64_t k_pages_stride_page = 0, k_pages_stride_token = 0, k_pages_stride_head = 0;
  int64_t v_pages_stride_page = 0, v_pages_stride_token = 0, v_pages_stride_head = 0;
};
static_assert(std::is_trivially_copyable_v<KvWriteParams>);

// Throws std::invalid_argument when a shape, dtype or stride differs from the above; on the CPU
// also when a slot is neither -1 nor inside the cache, before anything is written.
void kv_write(const TensorView& k, const TensorView& v, const TensorView& k_pages,
              const TensorView& v_pages, const TensorView& slot_mapping, void* stream);

// The checks of kv_write and the parameters of its kernels; `op` starts the error texts.
KvWriteParams pack_kv_write_params(const char* op, const TensorView& k, const TensorView& v,
                                   const TensorView& k_pages, const TensorView& v_pages,
                                   const TensorView& slot_mapping);

}  // namespace astrai::kernels
