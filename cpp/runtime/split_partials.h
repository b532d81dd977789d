// Typed view of the split-KV attention partials inside the workspace.
#pragma once

#include <cstdint>

#include "common/tensor_view.h"
#include "runtime/workspace.h"

namespace astrai::runtime {

// Borrowed buffers in which decode attention leaves one partial result per (task, query head,
// split) for the combine step. Every slot that is read has been written in the same call, so the
// buffers are never cleared.
struct SplitPartials {
  TensorView o_part;   // [max_batch, num_q_heads, max_splits, head_dim] float32
  TensorView ml_part;  // [max_batch, num_q_heads, max_splits, 2] float32: row maximum, row sum
  int64_t max_splits = 0;

  // Contiguous views of the first bytes, shaped [num_tasks, num_q_heads, num_splits, head_dim | 2].
  // Throws std::invalid_argument when num_tasks or num_splits is below 1 or above the capacity.
  SplitPartials view(int64_t num_tasks, int64_t num_splits) const;
};

SplitPartials split_partials(const InferenceWorkspace& workspace);

}  // namespace astrai::runtime
