#include "support/attn_case.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "common/check.h"
#include "support/test_random.h"

namespace astrai::testing {
namespace {

float rounded(DType dtype, float value) {
  switch (dtype) {
    case DType::kFloat16:
      return to_float(from_float<fp16>(value));
    case DType::kBFloat16:
      return to_float(from_float<bf16>(value));
    default:
      return value;
  }
}

std::vector<int64_t> prefix_sums(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> sums(lengths.size() + 1, 0);
  std::partial_sum(lengths.begin(), lengths.end(), sums.begin() + 1);
  return sums;
}

std::string list_text(const std::vector<int64_t>& values) {
  std::string text = "[";
  for (size_t i = 0; i < values.size(); ++i) text += concat(i ? "," : "", values[i]);
  return text + "]";
}

const char* op_name(AttnOp op) {
  switch (op) {
    case AttnOp::kDecode:
      return "attn_decode";
    case AttnOp::kPrefill:
      return "attn_prefill";
    case AttnOp::kPagedDecode:
      return "attn_paged_decode";
    case AttnOp::kPagedPrefill:
      break;
  }
  return "attn_paged_prefill";
}

}  // namespace

int64_t AttnCase::total_q() const {
  return std::accumulate(q_lens.begin(), q_lens.end(), int64_t{0});
}

int64_t AttnCase::longest_q() const {
  return q_lens.empty() ? 0 : *std::max_element(q_lens.begin(), q_lens.end());
}

int64_t AttnCase::longest_kv() const {
  return kv_lens.empty() ? 0 : *std::max_element(kv_lens.begin(), kv_lens.end());
}

std::string AttnCase::name() const {
  return concat(op_name(op), " ", dtype_name(dtype), " heads ", num_q_heads, ":", num_kv_heads,
                " D ", head_dim, " q_lens ", list_text(q_lens), " kv_lens ", list_text(kv_lens),
                is_paged() ? concat(" page_size ", page_size) : "", " layout ",
                static_cast<int>(layout), " mask ", static_cast<int>(mask), "+", mask_extra_keys,
                " causal ", static_cast<int>(causal), " offset ", causal_offset, " offsets ",
                list_text(causal_offsets), " window ", window, " softcap ", softcap, " sinks ",
                sinks, " splits ", num_splits, " partials ", static_cast<int>(partials), " poison ",
                static_cast<int>(poison), " seed ", seed);
}

AttnNumbers make_numbers(const AttnCase& test) {
  Random random(test.seed + 1000003 * test_seed());
  AttnNumbers numbers;
  numbers.q_begin = prefix_sums(test.q_lens);
  numbers.kv_begin = prefix_sums(test.kv_lens);
  const auto fill = [&](std::vector<float>& values, int64_t count, float spread) {
    values.resize(static_cast<size_t>(count));
    for (float& value : values) value = rounded(test.dtype, random.normal() * spread);
  };
  fill(numbers.q, test.total_q() * test.num_q_heads * test.head_dim, test.score_spread);
  fill(numbers.k, numbers.kv_begin.back() * test.num_kv_heads * test.head_dim, 1.0f);
  fill(numbers.v, numbers.kv_begin.back() * test.num_kv_heads * test.head_dim, 1.0f);
  if (test.sinks) {
    fill(numbers.sinks, test.num_q_heads, 2.0f);
  }
  if (test.mask != MaskKind::kNone) {
    numbers.mask_keys = std::max<int64_t>(0, test.longest_kv() + test.mask_extra_keys);
    const int64_t rows = test.mask == MaskKind::kPerQuery ? test.longest_q() : 1;
    numbers.mask.resize(static_cast<size_t>(test.num_requests() * rows * numbers.mask_keys));
    // Dense stretches, sparse stretches and, now and then, a row that sees nothing.
    for (int64_t row = 0; row < test.num_requests() * rows; ++row) {
      const int64_t keep_of_8 = row % 5 == 3 ? 0 : 1 + random.below(8);
      for (int64_t key = 0; key < numbers.mask_keys; ++key) {
        numbers.mask[static_cast<size_t>(row * numbers.mask_keys + key)] =
            random.below(8) < keep_of_8 ? 1 : 0;
      }
    }
  }
  return numbers;
}

bool sees(const AttnCase& test, const AttnNumbers& numbers, int64_t request, int64_t row,
          int64_t key) {
  const auto b = static_cast<size_t>(request);
  if (key >= test.kv_lens[b]) return false;
  int64_t position = test.kv_lens[b] - test.q_lens[b] + row;
  bool causal = test.causal != CausalKind::kNone;
  if (test.causal == CausalKind::kFixed) position = test.causal_offset + row;
  if (test.causal == CausalKind::kPerRequest) {
    causal = test.causal_offsets[b] >= 0;
    if (causal) position = test.causal_offsets[b] + row;
  }
  if (causal && key > position) return false;
  if (test.window >= 1 && key <= position - test.window) return false;
  if (test.mask == MaskKind::kNone) return true;
  if (key >= numbers.mask_keys) return false;
  const int64_t rows = test.mask == MaskKind::kPerQuery ? test.longest_q() : 1;
  const int64_t mask_row = request * rows + (test.mask == MaskKind::kPerQuery ? row : 0);
  return numbers.mask[static_cast<size_t>(mask_row * numbers.mask_keys + key)] != 0;
}

AttnAnswer exact_answer(const AttnCase& test, const AttnNumbers& numbers) {
  const int64_t dim = test.head_dim;
  const int64_t group = test.num_q_heads / test.num_kv_heads;
  const double scale = test.scale.value_or(1.0f / std::sqrt(static_cast<float>(dim)));
  AttnAnswer answer;
  answer.out.assign(numbers.q.size(), 0.0);
  answer.lse.assign(static_cast<size_t>(test.total_q() * test.num_q_heads),
                    -std::numeric_limits<double>::infinity());
  std::vector<int64_t> keys;
  std::vector<double> logits;
  for (int64_t b = 0; b < test.num_requests(); ++b) {
    const auto bi = static_cast<size_t>(b);
    for (int64_t row = 0; row < test.q_lens[bi]; ++row) {
      keys.clear();
      for (int64_t key = 0; key < test.kv_lens[bi]; ++key) {
        if (sees(test, numbers, b, row, key)) keys.push_back(numbers.kv_begin[bi] + key);
      }
      if (keys.empty()) continue;
      for (int64_t head = 0; head < test.num_q_heads; ++head) {
        const int64_t out_row = (numbers.q_begin[bi] + row) * test.num_q_heads + head;
        const float* q = numbers.q.data() + out_row * dim;
        logits.clear();
        double top = -std::numeric_limits<double>::infinity();
        for (int64_t key : keys) {
          const float* k = numbers.k.data() + (key * test.num_kv_heads + head / group) * dim;
          double dot = 0.0;
          for (int64_t d = 0; d < dim; ++d) dot += static_cast<double>(q[d]) * k[d];
          dot *= scale;
          if (test.softcap > 0.0f) dot = test.softcap * std::tanh(dot / test.softcap);
          logits.push_back(dot);
          top = std::max(top, dot);
        }
        if (test.sinks) top = std::max<double>(top, numbers.sinks[static_cast<size_t>(head)]);
        double sum = test.sinks ? std::exp(numbers.sinks[static_cast<size_t>(head)] - top) : 0.0;
        double* out = answer.out.data() + out_row * dim;
        for (size_t i = 0; i < keys.size(); ++i) {
          const double weight = std::exp(logits[i] - top);
          sum += weight;
          const float* v = numbers.v.data() + (keys[i] * test.num_kv_heads + head / group) * dim;
          for (int64_t d = 0; d < dim; ++d) out[d] += weight * v[d];
        }
        for (int64_t d = 0; d < dim; ++d) out[d] /= sum;
        answer.lse[static_cast<size_t>(out_row)] = top + std::log(sum);
      }
    }
  }
  return answer;
}

double out_tolerance(DType dtype, double expected) {
  const double magnitude = 1.0 + std::abs(expected);
  return (dtype == DType::kFloat32 ? 1e-5 : 2e-2) * magnitude;
}

double lse_tolerance(double expected) {
  return 1e-5 * (1.0 + std::abs(expected));
}

}  // namespace astrai::testing
