// Decode attention, split over KV. A task is one (request, split, range of KV heads): it walks the
// split's keys once, for all query heads of its KV heads. With more than one split, tasks leave
// normalised partial results which a second pass merges; with one split they write the output.
#include "common/thread_pool.h"
#include "kernels/attention/attn_dispatch.h"
#include "kernels/cpu/attn_common.h"
#include "kernels/cpu/attn_rows.h"

namespace astrai::kernels::cpu::ASTRAI_ISA {
namespace {

// Tasks that each thread should find, so that a slow one does not leave the others waiting.
constexpr int64_t kTasksPerThread = 4;

// Merging fewer floats than this is quicker than waking the pool.
constexpr int64_t kSerialCombineFloats = 16384;

// The keys of one split. Depends on the request's own range only.
KeyRange split_range(const AttentionParams& params, KeyRange visible, int64_t split) {
  const int64_t keys = visible.last - visible.first;
  const int64_t length = max_of(params.min_split_keys, ceil_div(keys, params.num_splits));
  const int64_t first = min_of(visible.first + split * length, visible.last);
  return {first, min_of(first + length, visible.last)};
}

template <int D>
void store_partial(const AttentionParams& params, int64_t request, int64_t head, int64_t split,
                   const float* numerator, RowSoftmax state) {
  const int64_t slot = (request * params.num_q_heads + head) * params.num_splits + split;
  const VecF factor = vset1(state.sum == 0.0f ? 0.0f : 1.0f / state.sum);
  float* o_part = params.o_part + slot * D;
  for (int d = 0; d < D; d += VecF::kLanes) vstore(o_part + d, vload(numerator + d) * factor);
  params.ml_part[2 * slot] = state.max;
  params.ml_part[2 * slot + 1] = state.sum;
}

template <class T, int D>
void run_task(const AttentionParams& params, int64_t index, int64_t split, int64_t kv_first,
              int64_t kv_last) {
  const int64_t group = params.num_q_heads / params.num_kv_heads;
  const int64_t num_heads = (kv_last - kv_first) * group;
  const RowScratch scratch = carve_row_scratch<D>(
      thread_scratch(static_cast<size_t>(row_scratch_bytes<D>(num_heads))), num_heads);
  const Request request = load_request(params, index);
  const KeyRange range = split_range(params, visible_keys(params, request, 0), split);
  attend_row<T, D>(params, request, 0, range, kv_first, kv_last, scratch);
  for (int64_t h = 0; h < num_heads; ++h) {
    const int64_t head = kv_first * group + h;
    const float* numerator = scratch.acc + h * kPaddedDim<D>;
    if (params.num_splits == 1) {
      finish_row<T, D>(params, request, 0, head, numerator, scratch.softmax[h]);
    } else {
      store_partial<D>(params, index, head, split, numerator, scratch.softmax[h]);
    }
  }
}

// Merges the splits of one query head: with M the largest maximum, each part counts
// exp(max - M) * sum.
template <class T, int D>
void combine_head(const AttentionParams& params, int64_t index, int64_t head) {
  const int64_t first_slot = (index * params.num_q_heads + head) * params.num_splits;
  const float* o_part = params.o_part + first_slot * D;
  const float* ml_part = params.ml_part + first_slot * 2;
  RowSoftmax state;
  for (int64_t split = 0; split < params.num_splits; ++split) {
    // A NaN maximum must win, hence the negated comparison.
    if (!(ml_part[2 * split] <= state.max)) state.max = ml_part[2 * split];
  }
  float numerator[D];
  for (int d = 0; d < D; d += VecF::kLanes) vstore(numerator + d, vzero());
  for (int64_t split = 0; split < params.num_splits; ++split) {
    const float max = ml_part[2 * split];
    const float sum = ml_part[2 * split + 1];
    if (max == kNegInf && sum == 0.0f) continue;  // an empty part
    const float part = (max == state.max ? 1.0f : exp_one(max - state.max)) * sum;
    state.sum += part;
    const VecF weight = vset1(part);
    for (int d = 0; d < D; d += VecF::kLanes) {
      vstore(numerator + d, vfma(weight, vload(o_part + split * D + d), vload(numerator + d)));
    }
  }
  finish_row<T, D>(params, load_request(params, index), 0, head, numerator, state);
}

template <class T, int D>
void decode(const AttentionParams& params) {
  // KV heads of a request stay together, which reads memory in order, until the tasks get too few.
  const int64_t rows = params.num_requests * params.num_splits;
  const int64_t wanted = ceil_div(kTasksPerThread * num_threads(), rows);
  const int64_t heads_per_task = ceil_div(params.num_kv_heads, min_of(wanted, params.num_kv_heads));
  const int64_t head_tasks = ceil_div(params.num_kv_heads, heads_per_task);
  parallel_for(rows * head_tasks, [&](int64_t task) {
    const int64_t row = task / head_tasks;
    const int64_t kv_first = task % head_tasks * heads_per_task;
    const int64_t kv_last = min_of(kv_first + heads_per_task, params.num_kv_heads);
    run_task<T, D>(params, row / params.num_splits, row % params.num_splits, kv_first, kv_last);
  });
  if (params.num_splits == 1) return;

  const auto combine_request = [&](int64_t index) {
    for (int64_t head = 0; head < params.num_q_heads; ++head) {
      combine_head<T, D>(params, index, head);
    }
  };
  if (rows * params.num_q_heads * D < kSerialCombineFloats) {
    for (int64_t index = 0; index < params.num_requests; ++index) combine_request(index);
  } else if (params.num_requests >= num_threads()) {
    parallel_for(params.num_requests, combine_request);
  } else {
    parallel_for(params.num_requests * params.num_q_heads, [&](int64_t task) {
      combine_head<T, D>(params, task / params.num_q_heads, task % params.num_q_heads);
    });
  }
}

}  // namespace

void attn_decode(const AttentionParams& params) {
  dispatch_float_dtype(params.dtype, [&]<class T>() {
    dispatch_head_dim(params.head_dim, [&]<int D>() { decode<T, D>(params); });
  });
}

}  // namespace astrai::kernels::cpu::ASTRAI_ISA
