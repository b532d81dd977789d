// Prefill attention, split over queries.
#include "common/thread_pool.h"
#include "kernels/attention/attn_dispatch.h"
#include "kernels/cpu/attn_common.h"
#include "kernels/cpu/attn_rows.h"

namespace astrai::kernels::cpu::ASTRAI_ISA {
namespace {

template <class T, int D>
void prefill(const AttentionParams& params) {
  const int64_t group = params.num_q_heads / params.num_kv_heads;
  parallel_for(params.num_requests * params.num_kv_heads, [&](int64_t task) {
    const Request request = load_request(params, task / params.num_kv_heads);
    const int64_t kv_head = task % params.num_kv_heads;
    const RowScratch scratch = carve_row_scratch<D>(
        thread_scratch(static_cast<size_t>(row_scratch_bytes<D>(group))), group);
    for (int64_t row = 0; row < request.q_len; ++row) {
      attend_row<T, D>(params, request, row, visible_keys(params, request, row), kv_head,
                       kv_head + 1, scratch);
      for (int64_t h = 0; h < group; ++h) {
        finish_row<T, D>(params, request, row, kv_head * group + h, scratch.acc + h * kPaddedDim<D>,
                         scratch.softmax[h]);
      }
    }
  });
}

}  // namespace

void attn_prefill(const AttentionParams& params) {
  dispatch_float_dtype(params.dtype, [&]<class T>() {
    dispatch_head_dim(params.head_dim, [&]<int D>() { prefill<T, D>(params); });
  });
}

}  // namespace astrai::kernels::cpu::ASTRAI_ISA
