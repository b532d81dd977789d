// One attention test case: a description, the numbers made from it, and the exact answer. Nothing
// here knows of memory layouts or devices; attn_runner.h takes a case to a kernel.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/dtype.h"
#include "support/test_tensor.h"

namespace astrai::testing {

enum class AttnOp { kDecode, kPrefill, kPagedDecode, kPagedPrefill };

enum class MaskKind {
  kNone,
  kPerKey,    // [B, Lk]
  kPerQuery,  // [B, Lq, Lk]
};

enum class CausalKind { kNone, kFixed, kPerRequest, kFromLengths };

// How tensors lie in memory. q, k, v and out of one case use different strides of the same kind.
enum class Layout {
  kPlain,        // [B, L, H, D] or [P, S, H, D], contiguous
  kHeadsFirst,   // [B, H, L, D] or [P, H, S, D] in memory
  kInterleaved,  // tokens of a wider buffer: odd gaps after each head and each token
  kAligned,      // the same, with gaps that keep rows at multiples of 16 bytes
};

enum class PartialsKind {
  kOwn,        // the kernel's scratch
  kExact,      // preallocated for B and num_splits
  kOversized,  // preallocated for more requests and splits
};

struct AttnCase {
  AttnOp op = AttnOp::kDecode;
  DType dtype = DType::kFloat32;
  int64_t num_q_heads = 1;
  int64_t num_kv_heads = 1;
  int64_t head_dim = 64;
  std::vector<int64_t> q_lens;   // all 1 for decode; all equal when dense
  std::vector<int64_t> kv_lens;  // all equal when dense
  int64_t page_size = 16;
  Layout layout = Layout::kPlain;
  MaskKind mask = MaskKind::kNone;
  int64_t mask_extra_keys = 0;  // paged: width of the mask minus the longest kv_len
  CausalKind causal = CausalKind::kNone;
  int64_t causal_offset = 0;            // for kFixed
  std::vector<int64_t> causal_offsets;  // for kPerRequest; -1 = not causal
  int64_t window = -1;
  float softcap = 0.0f;
  bool sinks = false;
  std::optional<float> scale;
  float score_spread = 1.0f;  // multiplies q
  int64_t num_splits = 0;
  PartialsKind partials = PartialsKind::kOwn;
  bool want_lse = true;
  Poison poison = Poison::kNan;
  uint64_t seed = 1;

  bool is_paged() const { return op == AttnOp::kPagedDecode || op == AttnOp::kPagedPrefill; }
  bool is_decode() const { return op == AttnOp::kDecode || op == AttnOp::kPagedDecode; }
  int64_t num_requests() const { return static_cast<int64_t>(q_lens.size()); }
  int64_t total_q() const;
  int64_t longest_q() const;
  int64_t longest_kv() const;
  std::string name() const;
};

// The numbers of a case, already rounded to its dtype. Rows of all requests follow one another.
struct AttnNumbers {
  std::vector<float> q;       // [total_q, Hq, D]
  std::vector<float> k;       // [total_kv, Hkv, D]
  std::vector<float> v;       // [total_kv, Hkv, D]
  std::vector<uint8_t> mask;  // [B, longest_q or 1, mask_keys]; empty = none
  int64_t mask_keys = 0;
  std::vector<float> sinks;       // [Hq]; empty = none
  std::vector<int64_t> q_begin;   // [B + 1]
  std::vector<int64_t> kv_begin;  // [B + 1]
};

AttnNumbers make_numbers(const AttnCase& test);

// True when query row `row` of a request sees its key `key`.
bool sees(const AttnCase& test, const AttnNumbers& numbers, int64_t request, int64_t row,
          int64_t key);

struct AttnAnswer {
  std::vector<double> out;  // [total_q, Hq, D]
  std::vector<double> lse;  // [total_q, Hq]
};

// In double precision, straight from the definition, looking at nothing that a row does not see.
AttnAnswer exact_answer(const AttnCase& test, const AttnNumbers& numbers);

// Tolerance of one output element against the exact answer.
double out_tolerance(DType dtype, double expected);
double lse_tolerance(double expected);

}  // namespace astrai::testing
