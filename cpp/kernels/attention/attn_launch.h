// Host entry points of the attention kernels: check, plan, launch on the tensors' device.
// No CUDA and no Python types here. See attn_params.h for what a row sees.
#pragma once

#include <cstdint>
#include <optional>

#include "common/tensor_view.h"

namespace astrai::kernels {

// A whole number of rounds of every CUDA decode kernel.
constexpr int64_t kFixedSplitUnit = 128;

// What all four entry points share. Optional tensors are null.
struct AttentionOptions {
  const TensorView* mask = nullptr;   // bool [B, Lk] or [B, Lq, Lk], true = keep
  int64_t window = -1;                // >= 1, or -1 for none
  float softcap = 0.0f;               // >= 0; 0 = none
  const TensorView* sinks = nullptr;  // float32 [Hq], contiguous
  std::optional<float> scale;         // default D ** -0.5
  const TensorView* lse = nullptr;    // float32, contiguous; shape in attn_params.h
  // Preallocated split partials of decode, float32, contiguous: [>= B, Hq, splits, D] and
  // [>= B, Hq, splits, 2]. Give both or neither; without them the kernel takes scratch of its own.
  // They are scratch: filled from the start as [B, Hq, num_splits, ...] where fewer splits are used
  // than they hold. Prefill, which is not split over KV, leaves them alone.
  const TensorView* o_part = nullptr;
  const TensorView* ml_part = nullptr;
  // 0 = choose; at most what the partials hold. Prefill: 0 or 1; on CUDA 0 may divide a row's keys
  // over two groups of warps where the batch leaves the device idle, which shows in the last bits,
  // 1 never does.
  int64_t num_splits = 0;
  // Decode only. > 0: splits of so many keys, a multiple of kFixedSplitUnit, so that a request's
  // result does not depend on what else is in the batch, bit for bit. 0 = the fastest splits. The
  // CPU's splits are always of the first kind.
  int64_t fixed_split_keys = 0;
  // Paged decode on CUDA, where kv_lens cannot be read: no request is longer; 0 = unknown, any can
  // have all of kv_indices. It bounds the number of fixed splits. A longer request is still right,
  // but its fixed splits are longer.
  int64_t max_kv_len = 0;
  // Prefill on the CPU alone. Every row is computed as decode computes it, bit for bit, so that a
  // token's result does not depend on whether it came in a prompt. Slower: keys are read once for
  // every row.
  bool match_decode = false;
  void* stream = nullptr;  // cudaStream_t; ignored on the CPU
};

// Dense, [B, L, H, D] by strides, any layout. Decode has exactly one query a request and is split
// over KV; prefill has any number and is split over queries. causal_offset: -1 = not causal; >= 0 =
// position, in the key axis, of the first query. Throws std::invalid_argument when anything differs
// from the contract, before any memory is touched.
void attn_decode(const TensorView& q, const TensorView& k, const TensorView& v,
                 const TensorView& out, int64_t causal_offset, const AttentionOptions& options);
void attn_prefill(const TensorView& q, const TensorView& k, const TensorView& v,
                  const TensorView& out, int64_t causal_offset, const AttentionOptions& options);

// Paged keys and values [P, S, Hkv, D]; page lists in CSR form, int32.
struct PagedKv {
  const TensorView& k_pages;
  const TensorView& v_pages;
  const TensorView& kv_indptr;   // [B + 1]
  const TensorView& kv_indices;  // [>= kv_indptr[B]]
  const TensorView& kv_lens;     // [B]
};

// q and out [B, Hq, D] or [B, 1, Hq, D]. The one query of a request sees all its kv_lens[b] keys
// (within the window).
void attn_paged_decode(const TensorView& q, const PagedKv& kv, const TensorView& out,
                       const AttentionOptions& options);

// How queries of attn_paged_prefill are placed on the key axis.
struct PagedCausal {
  bool from_lengths = true;             // offset = kv_len - q_len of each request
  int64_t offset = -1;                  // else this one for all: -1 = not causal
  const TensorView* offsets = nullptr;  // else int32 [B]
};

// Ragged: q and out [T, Hq, D], request b owns rows qo_indptr[b] .. qo_indptr[b + 1].
void attn_paged_prefill(const TensorView& q, const PagedKv& kv, const TensorView& qo_indptr,
                        const TensorView& out, const PagedCausal& causal,
                        const AttentionOptions& options);

}  // namespace astrai::kernels
