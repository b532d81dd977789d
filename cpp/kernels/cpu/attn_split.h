// Parts of one row's keys, and how their results are merged.
#pragma once

#include "kernels/cpu/attn_common.h"

namespace astrai::kernels::cpu::ASTRAI_ISA {

// The keys of one split. Depends on the request's own range only.
inline KeyRange split_range(const AttentionParams& params, KeyRange visible, int64_t split) {
  const int64_t keys = visible.last - visible.first;
  const int64_t length = max_of(params.min_split_keys, ceil_div(keys, params.num_splits));
  const int64_t first = min_of(visible.first + split * length, visible.last);
  return {first, min_of(first + length, visible.last)};
}

// The partial results of one query head: [num_splits, D] and [num_splits, 2].
struct Partials {
  float* o;
  float* ml;
};

inline Partials partials_of(const AttentionParams& params, int64_t request, int64_t head) {
  const int64_t slot = (request * params.num_q_heads + head) * params.num_splits;
  return {params.o_part + slot * params.head_dim, params.ml_part + slot * 2};
}

template <int D>
void store_partial(const Partials& partials, int64_t split, const float* numerator,
                   RowSoftmax state) {
  const VecF factor = vset1(state.sum == 0.0f ? 0.0f : 1.0f / state.sum);
  float* o = partials.o + split * D;
  for (int d = 0; d < D; d += VecF::kLanes) vstore(o + d, vload(numerator + d) * factor);
  partials.ml[2 * split] = state.max;
  partials.ml[2 * split + 1] = state.sum;
}

// Merges the parts of a row and takes it to out and lse: with M the largest maximum, each part
// weighs exp(max - M) * sum, divided by the total. A sink joins the total here; a row that saw no
// key is zeros with LSE -inf, sink or not. Empty parts change nothing, not even by rounding.
template <class T, int D>
void merge_partials(const AttentionParams& params, const Request& request, int64_t row,
                    int64_t head, const Partials& partials, int64_t num_parts) {
  const float* ml = partials.ml;
  const auto is_empty = [&](int64_t part) {
    return ml[2 * part] == kNegInf && ml[2 * part + 1] == 0.0f;
  };
  const auto weight_of = [&](int64_t part, float max) {
    return (ml[2 * part] == max ? 1.0f : exp_one(ml[2 * part] - max)) * ml[2 * part + 1];
  };
  bool empty = true;
  float max = kNegInf;
  for (int64_t part = 0; part < num_parts; ++part) {
    if (is_empty(part)) continue;
    empty = false;
    // A NaN maximum must win, hence the negated comparison.
    if (!(ml[2 * part] <= max)) max = ml[2 * part];
  }
  float total = 0.0f;
  if (params.sinks != nullptr && !empty) {
    const float sink = params.sinks[head];
    if (sink > max) max = sink;
    total = exp_one(sink - max);
  }
  for (int64_t part = 0; part < num_parts; ++part) {
    if (!is_empty(part)) total += weight_of(part, max);
  }

  float sum[D];
  for (int d = 0; d < D; d += VecF::kLanes) vstore(sum + d, vzero());
  for (int64_t part = 0; part < num_parts; ++part) {
    if (is_empty(part)) continue;
    const VecF weight = vset1(weight_of(part, max) / total);
    const float* o = partials.o + part * D;
    for (int d = 0; d < D; d += VecF::kLanes) {
      vstore(sum + d, vfma(weight, vload(o + d), vload(sum + d)));
    }
  }
  T* out = out_row<T>(params, request, row, head);
  for (int d = 0; d < D; d += VecF::kLanes) vstore(out + d, vload(sum + d));
  if (params.lse != nullptr) {
    *lse_entry(params, request, row, head) = empty ? kNegInf : max + __builtin_logf(total);
  }
}

// A row that was not split: numerators in memory order, not yet divided.
template <class T, int D>
void finish_row(const AttentionParams& params, const Request& request, int64_t row, int64_t head,
                const float* numerator, RowSoftmax state) {
  float o[D];
  float ml[2];
  store_partial<D>({o, ml}, 0, numerator, state);
  merge_partials<T, D>(params, request, row, head, {o, ml}, 1);
}

// One query row of a request, for the query heads of one KV head. Runs on the calling thread, split
// by split, and gives the bits that attn_decode gives. Defined in attn_decode.cpp.
void decode_single_row(const AttentionParams& params, const Request& request, int64_t row,
                       int64_t kv_head);

}  // namespace astrai::kernels::cpu::ASTRAI_ISA
