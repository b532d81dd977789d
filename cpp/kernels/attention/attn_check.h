// Host checks of the attention entry points, the same for every device. They turn tensors and
// options into an AttentionParams, or throw before any of the tensors' memory is read or written.
#pragma once

#include "kernels/attention/attn_launch.h"
#include "kernels/attention/attn_params.h"

namespace astrai::kernels {

// Dense attention, decode or prefill. `op` starts the error texts. num_splits and the partials of
// the result are what the options hold (0 and null when the options leave the choice open); the
// caller plans them. Throws std::invalid_argument.
AttentionParams attn_pack_dense_params(const char* op, const TensorView& q, const TensorView& k,
                                       const TensorView& v, const TensorView& out,
                                       int64_t causal_offset, const AttentionOptions& options);

// Paged attention: decode when qo_indptr is null (q [B, Hq, D] or [B, 1, Hq, D], not causal), else
// ragged prefill (q [T, Hq, D]). On the CPU the contents of kv_indptr, kv_lens, qo_indptr and the
// used entries of kv_indices are checked too, and kv_len and q_len are the true maxima. On CUDA
// nothing is read: kv_len is the bound that kv_indices can hold and q_len is T. Throws
// std::invalid_argument.
AttentionParams attn_pack_paged_params(const char* op, const TensorView& q, const PagedKv& kv,
                                       const TensorView* qo_indptr, const TensorView& out,
                                       const PagedCausal& causal, const AttentionOptions& options);

}  // namespace astrai::kernels
