// Host facts of one step. The arrays that go with them lie in the workspace slices.
#pragma once

#include <cstdint>

namespace astrai::runtime {

// Filled by PagePool::bind_tasks. Slices hold their values in the first num_rows entries (per task;
// indptr arrays num_rows + 1) or num_row_tokens entries (per token); what follows is stale.
struct StepMetadata {
  int64_t num_tasks = 0;       // real tasks
  int64_t num_tokens = 0;      // new tokens of the real tasks: the sum of q_lens
  int64_t num_rows = 0;        // tasks with padding: max(num_tasks, pad_to)
  int64_t num_row_tokens = 0;  // tokens with padding, one for each padding row
  int64_t max_q_len = 0;       // longest q_len; padding counts as 1
  int64_t max_kv_len = 0;      // longest task, the new tokens included; padding counts as 0
  int64_t num_pages_used = 0;  // entries of kv_indices
  int64_t metadata_bytes = 0;  // used bytes from the start of the workspace's step_metadata range
  bool is_decode = false;      // every q_len is 1
};

}  // namespace astrai::runtime
