// Decode attention, split over KV. A task is one (request, split, range of KV heads): it walks the
// split's keys once, for all query heads of its KV heads. With more than one split, tasks leave
// normalised partial results which a second pass merges; with one split they write the output.
#include "common/thread_pool.h"
#include "kernels/attention/attn_dispatch.h"
#include "kernels/cpu/attn_common.h"
#include "kernels/cpu/attn_rows.h"
#include "kernels/cpu/attn_split.h"

namespace astrai::kernels::cpu::ASTRAI_ISA {
namespace {

// Tasks that each thread should find, so that a slow one does not leave the others waiting.
constexpr int64_t kTasksPerThread = 4;

// Merging fewer floats than this is quicker than waking the pool.
constexpr int64_t kSerialMergeFloats = 16384;

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
      store_partial<D>(partials_of(params, index, head), split, numerator, scratch.softmax[h]);
    }
  }
}

template <class T, int D>
void merge_all(const AttentionParams& params) {
  const int64_t rows = params.num_requests * params.num_q_heads;
  const auto merge = [&](int64_t row) {
    const int64_t index = row / params.num_q_heads;
    const int64_t head = row % params.num_q_heads;
    merge_partials<T, D>(params, load_request(params, index), 0, head,
                         partials_of(params, index, head), params.num_splits);
  };
  if (rows * params.num_splits * D < kSerialMergeFloats) {
    for (int64_t row = 0; row < rows; ++row) merge(row);
    return;
  }
  // As many rows a task as make it worth handing out.
  const int64_t rows_per_task = ceil_div(kSerialMergeFloats / 4, params.num_splits * D);
  parallel_for(ceil_div(rows, rows_per_task), [&](int64_t task) {
    const int64_t last = min_of((task + 1) * rows_per_task, rows);
    for (int64_t row = task * rows_per_task; row < last; ++row) merge(row);
  });
}

template <class T, int D>
void decode(const AttentionParams& params) {
  // KV heads of a request stay together, which reads memory in order, until the tasks get too few.
  const int64_t parts = params.num_requests * params.num_splits;
  const int64_t wanted = ceil_div(kTasksPerThread * num_threads(), parts);
  const int64_t heads_per_task = ceil_div(params.num_kv_heads, min_of(wanted, params.num_kv_heads));
  const int64_t head_tasks = ceil_div(params.num_kv_heads, heads_per_task);
  parallel_for(parts * head_tasks, [&](int64_t task) {
    const int64_t part = task / head_tasks;
    const int64_t kv_first = task % head_tasks * heads_per_task;
    const int64_t kv_last = min_of(kv_first + heads_per_task, params.num_kv_heads);
    run_task<T, D>(params, part / params.num_splits, part % params.num_splits, kv_first, kv_last);
  });
  if (params.num_splits > 1) merge_all<T, D>(params);
}

template <class T, int D>
void single_row(const AttentionParams& params, const Request& request, int64_t row,
                int64_t kv_head) {
  const int64_t group = params.num_q_heads / params.num_kv_heads;
  const RowScratch scratch = carve_row_scratch<D>(
      thread_scratch(static_cast<size_t>(row_scratch_bytes<D>(group)), 0), group);
  const KeyRange visible = visible_keys(params, request, row);
  if (params.num_splits == 1) {
    attend_row<T, D>(params, request, row, visible, kv_head, kv_head + 1, scratch);
    for (int64_t h = 0; h < group; ++h) {
      finish_row<T, D>(params, request, row, kv_head * group + h, scratch.acc + h * kPaddedDim<D>,
                       scratch.softmax[h]);
    }
    return;
  }
  const int64_t head_floats = params.num_splits * (D + 2);
  float* memory = static_cast<float*>(
      thread_scratch(static_cast<size_t>(group * head_floats) * sizeof(float), 1));
  for (int64_t split = 0; split < params.num_splits; ++split) {
    attend_row<T, D>(params, request, row, split_range(params, visible, split), kv_head,
                     kv_head + 1, scratch);
    for (int64_t h = 0; h < group; ++h) {
      float* o = memory + h * head_floats;
      store_partial<D>({o, o + params.num_splits * D}, split, scratch.acc + h * kPaddedDim<D>,
                       scratch.softmax[h]);
    }
  }
  for (int64_t h = 0; h < group; ++h) {
    float* o = memory + h * head_floats;
    merge_partials<T, D>(params, request, row, kv_head * group + h, {o, o + params.num_splits * D},
                         params.num_splits);
  }
}

}  // namespace

void attn_decode(const AttentionParams& params) {
  dispatch_float_dtype(params.dtype, [&]<class T>() {
    dispatch_head_dim(params.head_dim, [&]<int D>() { decode<T, D>(params); });
  });
}

void decode_single_row(const AttentionParams& params, const Request& request, int64_t row,
                       int64_t kv_head) {
  dispatch_float_dtype(params.dtype, [&]<class T>() {
    dispatch_head_dim(params.head_dim,
                      [&]<int D>() { single_row<T, D>(params, request, row, kv_head); });
  });
}

}  // namespace astrai::kernels::cpu::ASTRAI_ISA
