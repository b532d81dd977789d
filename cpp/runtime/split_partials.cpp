#include "runtime/split_partials.h"

#include "common/check.h"

namespace astrai::runtime {

SplitPartials SplitPartials::view(int64_t num_tasks, int64_t num_splits) const {
  const int64_t max_tasks = o_part.shape[0];
  ASTRAI_CHECK_ARG(num_tasks >= 1 && num_tasks <= max_tasks, "split_partials: num_tasks is ",
                   num_tasks, "; expected 1 to ", max_tasks);
  ASTRAI_CHECK_ARG(num_splits >= 1 && num_splits <= max_splits, "split_partials: num_splits is ",
                   num_splits, "; expected 1 to ", max_splits);
  const int64_t num_q_heads = o_part.shape[1];
  const int64_t head_dim = o_part.shape[3];
  return {
      .o_part = TensorView::contiguous(
          o_part.data, o_part.dtype, {num_tasks, num_q_heads, num_splits, head_dim}, o_part.device),
      .ml_part = TensorView::contiguous(ml_part.data, ml_part.dtype,
                                        {num_tasks, num_q_heads, num_splits, 2}, ml_part.device),
      .max_splits = num_splits};
}

SplitPartials split_partials(const InferenceWorkspace& workspace) {
  return {.o_part = workspace.slice("o_part"),
          .ml_part = workspace.slice("ml_part"),
          .max_splits = workspace.shape().max_splits};
}

}  // namespace astrai::runtime
