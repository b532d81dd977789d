// The paged KV storage of a model together with everything that a layer needs to use it in a step.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "common/tensor_view.h"
#include "runtime/page_pool.h"
#include "runtime/split_partials.h"
#include "runtime/step_metadata.h"
#include "runtime/workspace.h"

namespace astrai::runtime {

struct LayerPages {
  TensorView k_pages;  // [num_pages, page_size, num_kv_heads, head_dim]
  TensorView v_pages;  // the same shape; strides of its own
};

// Borrows the storage, the pool and the workspace; the caller keeps all of them alive.
class KVCache {
 public:
  // k, v [num_layers, num_pages, page_size, num_kv_heads, head_dim] in the workspace's dtype and on
  // its device; any strides with head_dim contiguous. Shapes must agree with the pool (num_pages,
  // page_size) and the workspace (page_size, num_kv_heads, head_dim). Throws std::invalid_argument
  // with both values otherwise.
  KVCache(const TensorView& k, const TensorView& v, PagePool& pool, InferenceWorkspace& workspace);

  int64_t num_layers() const { return k_.shape[0]; }
  // Throws std::invalid_argument unless 0 <= index < num_layers.
  LayerPages layer(int64_t index) const;

  PagePool& pool() const { return *pool_; }
  InferenceWorkspace& workspace() const { return *workspace_; }
  SplitPartials partials() const { return split_partials(*workspace_); }

  // Does the queued page copies, then PagePool::bind_tasks; the result is kept as step().
  const StepMetadata& bind(std::span<const int64_t> task_ids, std::span<const int64_t> q_lens,
                           int64_t pad_to = 0);
  const StepMetadata& step() const { return step_; }

  // Takes the pool's queued page copies and does them in every layer. On a device other than the
  // CPU it throws std::runtime_error before any copy is taken, if there is one to do.
  void apply_page_copies();

 private:
  TensorView k_;
  TensorView v_;
  PagePool* pool_;
  InferenceWorkspace* workspace_;
  StepMetadata step_;
  std::vector<PageCopy> copies_;  // scratch of apply_page_copies
};

}  // namespace astrai::runtime
