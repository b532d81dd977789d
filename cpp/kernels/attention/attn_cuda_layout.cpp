#include "kernels/attention/attn_cuda_layout.h"

#include <algorithm>
#include <bit>
#include <initializer_list>

namespace astrai::kernels {
namespace {

struct Axis {
  int64_t extent;
  int64_t stride;
};

// The stride of an axis of extent 1 addresses nothing and may be anything.
bool rows_aligned(const void* data, DType dtype, int64_t elements,
                  std::initializer_list<Axis> axes) {
  const auto bytes = static_cast<uintptr_t>(elements * dtype_bytes(dtype));
  if (reinterpret_cast<uintptr_t>(data) % bytes != 0) return false;
  return std::all_of(axes.begin(), axes.end(), [&](const Axis& axis) {
    return axis.extent <= 1 || axis.stride % elements == 0;
  });
}

// Tokens along q's or out's token stride.
int64_t token_extent(const AttentionParams& params) {
  return params.qo_indptr == nullptr ? params.q_len : params.num_q_rows;
}

}  // namespace

bool q_rows_aligned(const AttentionParams& params, int64_t elements) {
  return rows_aligned(params.q, params.dtype, elements,
                      {{params.num_requests, params.q_stride_batch},
                       {token_extent(params), params.q_stride_token},
                       {params.num_q_heads, params.q_stride_head}});
}

bool kv_rows_aligned(const AttentionParams& params, int64_t elements) {
  const bool paged = params.page_size > 0;
  const int64_t batch = paged ? params.num_pages : params.num_requests;
  const int64_t tokens = paged ? params.page_size : params.kv_len;
  return rows_aligned(params.k, params.dtype, elements,
                      {{batch, params.k_stride_batch},
                       {tokens, params.k_stride_token},
                       {params.num_kv_heads, params.k_stride_head}}) &&
         rows_aligned(params.v, params.dtype, elements,
                      {{batch, params.v_stride_batch},
                       {tokens, params.v_stride_token},
                       {params.num_kv_heads, params.v_stride_head}});
}

bool out_rows_aligned(const AttentionParams& params, int64_t elements) {
  return rows_aligned(params.out, params.dtype, elements,
                      {{params.num_requests, params.out_stride_batch},
                       {token_extent(params), params.out_stride_token},
                       {params.num_q_heads, params.out_stride_head}});
}

int page_shift(int64_t page_size) {
  const auto size = static_cast<uint64_t>(page_size);
  return std::has_single_bit(size) ? std::countr_zero(size) : -1;
}

}  // namespace astrai::kernels
