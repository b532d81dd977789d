// The one description of an attention problem: dense or paged, decode or prefill, CPU or CUDA.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/dtype.h"

namespace astrai::kernels {

// causal_offset: no causal limit.
constexpr int64_t kNotCausal = -1;

// Where the position of a request's first query comes from when keys are paged.
enum class CausalMode : uint8_t {
  kNone,         // every key of the request is visible
  kFixed,        // causal_offset, the same for all requests
  kPerRequest,   // causal_offsets[request]; -1 there means not causal
  kFromLengths,  // kv_len - q_len: the queries are the request's last tokens
};

// Symbols: B requests, T query rows of all requests, Lq queries and Lk keys of a dense batch, Hq
// query heads, Hkv KV heads (Hq % Hkv == 0), D head dim, P pages of S tokens.
//
// A query row sees key j when j < kv_len, the mask keeps j, j <= position if causal, and
// j > position - window if window >= 1. The position of row i is its causal offset + i, or
// kv_len - q_len + i where there is no causal limit. A row that sees no key is zeros, with LSE
// -inf. Keys that are not seen may hold anything, NaN included: their memory never enters a result.
//
// All strides are in elements; the stride of the head dim is 1.
struct AttentionParams {
  // ---- tensors --------------------
  const void* q = nullptr;  // [B, Lq, Hq, D]; ragged prefill [T, Hq, D]; paged decode [B, Hq, D]
  const void* k = nullptr;  // dense [B, Lk, Hkv, D]; paged [P, S, Hkv, D]
  const void* v = nullptr;  // as k, with strides of its own
  void* out = nullptr;      // as q
  float* lse = nullptr;     // nullable; dense [B, Hq, Lq]; paged decode [B, Hq]; ragged [T, Hq]
  DType dtype = DType::kFloat32;  // of q, k, v and out: float32, float16 or bfloat16

  // ---- sizes --------------------
  int64_t num_requests = 0;  // B
  int64_t num_q_rows = 0;    // T: B * Lq when dense
  int64_t q_len = 0;         // Lq when dense; the longest query count of a request when ragged
  int64_t kv_len = 0;        // Lk when dense; upper bound of kv_lens when paged
  int64_t num_q_heads = 0;   // Hq
  int64_t num_kv_heads = 0;  // Hkv
  int64_t head_dim = 0;      // D

  // ---- strides, in elements --------------------
  int64_t q_stride_batch = 0;  // 0 when ragged: rows are found through qo_indptr
  int64_t q_stride_token = 0;
  int64_t q_stride_head = 0;
  int64_t k_stride_batch = 0;  // of a page when paged
  int64_t k_stride_token = 0;
  int64_t k_stride_head = 0;
  int64_t v_stride_batch = 0;
  int64_t v_stride_token = 0;
  int64_t v_stride_head = 0;
  int64_t out_stride_batch = 0;
  int64_t out_stride_token = 0;
  int64_t out_stride_head = 0;
  int64_t lse_stride_batch = 0;
  int64_t lse_stride_token = 0;
  int64_t lse_stride_head = 0;

  // ---- paged keys and values (page_size 0 = dense) --------------------
  int64_t page_size = 0;  // S
  int64_t num_pages = 0;  // P
  const int32_t* kv_indptr =
      nullptr;  // [B + 1]: request b owns kv_indices[indptr[b] .. indptr[b+1])
  const int32_t* kv_indices =
      nullptr;  // page ids; entries past a request's last used page are not read
  const int32_t* kv_lens = nullptr;    // [B], in tokens
  const int32_t* qo_indptr = nullptr;  // [B + 1] for ragged prefill, else null

  // ---- what a row sees --------------------
  CausalMode causal_mode = CausalMode::kNone;
  int64_t causal_offset = kNotCausal;       // for kFixed
  const int32_t* causal_offsets = nullptr;  // [B], for kPerRequest
  int64_t window = -1;                      // keys a row sees at most, itself included; -1 = all
  const uint8_t* mask = nullptr;            // nullable bool, nonzero = keep: [B, Lk] or [B, Lq, Lk]
  int64_t mask_stride_batch = 0;
  int64_t mask_stride_q = 0;  // 0 for [B, Lk]
  int64_t mask_stride_kv = 0;
  int64_t mask_kv_len = 0;  // keys at or past this one are masked out
  int64_t mask_q_len = 0;   // queries (of a request) at or past this one are; unused for [B, Lk]

  // ---- scores --------------------
  float scale = 0.0f;            // multiplies q.k
  float softcap = 0.0f;          // 0 = none, else s -> softcap * tanh(s / softcap)
  const float* sinks = nullptr;  // [Hq] or null: a further logit in the denominator, with no value

  // ---- split partials (decode) --------------------
  // A request's visible keys are cut into num_splits parts of equal length, at least
  // min_split_keys each, so the last parts may be empty. Every slot of every part is written, so
  // the buffers are never cleared.
  int64_t num_splits = 0;      // >= 1 in a kernel
  int64_t min_split_keys = 1;  // >= 1
  bool match_decode = false;   // prefill on the CPU: every row as decode computes it
  float* o_part = nullptr;     // [B, Hq, num_splits, D], each part normalised by its own sum
  float* ml_part = nullptr;  // [B, Hq, num_splits, 2]: maximum logit, sum of exp(logit - maximum);
                             // (-inf, 0) for an empty part
};

static_assert(std::is_trivially_copyable_v<AttentionParams>);

}  // namespace astrai::kernels
