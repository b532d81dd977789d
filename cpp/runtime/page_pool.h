// Bookkeeping of a paged KV cache: which page belongs to which task, and what a step will touch.
// Holds page ids only, never the tensors. Not thread-safe: one thread drives a pool.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "runtime/prefix_index.h"
#include "runtime/step_metadata.h"
#include "runtime/workspace.h"

namespace astrai::runtime {

// A copy that must be done before the next step writes: the first `num_tokens` tokens of page
// `src`, in every layer, K and V alike, to page `dst`.
struct PageCopy {
  int32_t src = 0;
  int32_t dst = 0;
  int64_t num_tokens = 0;

  bool operator==(const PageCopy&) const = default;
};

// Pages with reference counts, and the tasks that hold them.
//
// A task is a sequence under an id of the caller's choice. Page i of its list holds its tokens
// [i * page_size, (i + 1) * page_size). A page with tokens may be in several lists (fork, prefix
// adoption), always at the same place; pages past a task's length are that task's alone.
//
// The life of a step: try_reserve each task -> take_page_copies and do them -> bind_tasks -> run ->
// append. Pages freed between bind_tasks and the end of the run may be handed out again at once:
// work of a later step comes later on the same stream, or on a CPU after the run has returned.
//
// Every page is in one of three states: held by tasks (ref_count > 0), free, or parked. A page is
// parked when its last task let it go while a copy that was not yet taken still reads it; it
// becomes free when the copies are taken, or when that copy is cancelled because the page that it
// would write was let go too. So no page is handed out while a queued copy reads or writes it.
//
// Free pages are reused in the order in which they were freed; a task lets its pages go from the
// last to the first, so that heads of sequences, the more likely to be wanted again, survive
// longer.
//
// A page may be in the prefix index, where later tasks with the same tokens find it: it stays there
// while it is held, parked or free, until it is handed out for other contents or is about to be
// written. So free pages are a cache of finished prefixes that costs nothing, evicted oldest first.
//
// Errors: std::invalid_argument for a bad argument (an unknown task id among them), with nothing
// changed; std::runtime_error for a broken invariant.
class PagePool {
 public:
  // num_pages and page_size (tokens) are from 1 to 2^31 - 1. Page lists are reserved for
  // `max_task_tokens` tokens when a task is added, so that a task that stays within them never
  // allocates again; 0 lets lists grow as they need. It is no limit.
  PagePool(int64_t num_pages, int64_t page_size, int64_t max_task_tokens = 0);

  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  // A task of length 0 without pages. Throws if the id is in use.
  void add_task(int64_t task_id);

  // A task whose first num_tokens == shared_pages.size() * page_size tokens are those of
  // `shared_pages`. Page i must be page i of a task that has filled it.
  void add_task(int64_t task_id, std::span<const int32_t> shared_pages, int64_t num_tokens);

  // What the index holds of `tokens` under a salt: always whole pages, and never the last token,
  // which has to be computed for its logits.
  struct PrefixMatch {
    int64_t num_tokens = 0;
    int64_t num_unheld_pages = 0;  // of those, pages that adopting takes off the free list
  };
  PrefixMatch match_prefix(std::span<const int64_t> tokens, std::string_view salt = {}) const;

  // A task that begins with what match_prefix finds; returns its length. The caller may go on from
  // there as with any task.
  int64_t adopt_prefix(int64_t task_id, std::span<const int64_t> tokens,
                       std::string_view salt = {});

  // Puts the task's full pages into the index. `tokens` are the task's tokens from its first on, at
  // least as many as its full pages hold. Throws when some page is in the index with other tokens.
  void index_prefix(int64_t task_id, std::span<const int64_t> tokens, std::string_view salt = {});

  // The same for what follows `first_token`, a whole number of pages: it costs no walk over what
  // comes before. Returns false, with nothing changed, when the page before it is not in the index
  // (it never was, or another page holds the same tokens there): give index_prefix all tokens then.
  [[nodiscard]] bool extend_indexed(int64_t task_id, int64_t first_token,
                                    std::span<const int64_t> tokens);

  // Empties the index; tasks keep their pages.
  void clear_prefixes();
  int64_t num_indexed_pages() const { return index_.num_pages(); }

  // A new task `child` with the tokens and the pages of `parent`. Pages that the parent reserved
  // past its length stay its own.
  void fork(int64_t parent, int64_t child);

  // Makes room for num_new_tokens tokens after the task's length: afterwards its list covers them
  // and the page that the next token goes to is its own. If that page was shared it is replaced by
  // a fresh one and the copy of its tokens is queued. Returns false, with nothing changed, when
  // too few pages are free. May be called again before append; it never gives pages back.
  [[nodiscard]] bool try_reserve(int64_t task_id, int64_t num_new_tokens);

  // try_reserve of one token for one task after the other, until one fails: how many succeeded.
  // Throws, with nothing changed, for an unknown id among them.
  [[nodiscard]] int64_t try_reserve_one_each(std::span<const int64_t> task_ids);

  // Counts num_new_tokens tokens that a step has written into reserved pages. Throws when the
  // task's pages do not cover them.
  void append(int64_t task_id, int64_t num_new_tokens);

  // append for each of several distinct tasks, nothing changed when one of them throws.
  void append_each(std::span<const int64_t> task_ids, std::span<const int64_t> nums_new_tokens);

  // Shortens the task to num_tokens (0 to its length) and lets go of all pages past them, those
  // reserved included.
  void truncate(int64_t task_id, int64_t num_tokens);

  // Forgets the task and lets go of its pages. An id that is unknown, or was freed already, throws.
  void free_task(int64_t task_id);

  bool has_task(int64_t task_id) const { return tasks_.contains(task_id); }
  int64_t length(int64_t task_id) const;
  // Valid until the task changes.
  std::span<const int32_t> pages(int64_t task_id) const;

  int64_t num_pages() const { return num_pages_; }
  int64_t page_size() const { return page_size_; }
  int64_t num_tasks() const { return static_cast<int64_t>(tasks_.size()); }
  int64_t num_free_pages() const { return num_free_pages_; }
  int64_t num_parked_pages() const { return static_cast<int64_t>(parked_pages_.size()); }
  // Number of task lists that hold the page. Throws unless 0 <= page < num_pages.
  int64_t ref_count(int64_t page) const;

  // Copies queued by try_reserve, in the order in which they must be done (a page may be written by
  // one copy and read by a later one). The caller does them all before the next step's writes.
  int64_t num_pending_copies() const { return static_cast<int64_t>(pending_copies_.size()); }
  std::vector<PageCopy> take_page_copies();
  // The same into `copies`, which is cleared first; allocates only while it grows.
  void take_page_copies(std::vector<PageCopy>& copies);

  // Writes what a step needs into the host arrays of `workspace`: for each task in order its
  // kv_lens, qo_indptr, kv_indptr, last_rows and page ids, and for each of its q_lens[i] new tokens
  // position and slot. When the workspace has a host mirror, metadata_bytes bytes of it then have
  // to be copied to the slab. Changes nothing in the pool.
  //
  // `pad_to` > 0 pads the step to that many tasks: each padding row has one token with slot -1,
  // position 0 and kv_len 0. task_ids may be empty only then.
  //
  // Throws std::invalid_argument, before anything is written, when: sizes differ, an id is unknown
  // or twice in the list, a q_len is below 1, a task's pages do not cover its new tokens (call
  // try_reserve first), a task would be longer than max_context, or the step exceeds max_batch,
  // max_step_tokens or the capacity of kv_indices; when page sizes differ. Throws
  // std::runtime_error when a page to be written is shared or a queued copy was not taken.
  StepMetadata bind_tasks(const InferenceWorkspace& workspace, std::span<const int64_t> task_ids,
                          std::span<const int64_t> q_lens, int64_t pad_to = 0);

  // Recounts everything from the task lists and throws std::runtime_error describing the first
  // inconsistency: a wrong reference count, a page on the free list twice or while held, a list too
  // short for its task's length, a shared page past a task's length, pages that are nowhere, an
  // index that does not find its own pages.
  void check_integrity() const;

 private:
  friend struct PagePoolTestAccess;  // lets a test break an invariant on purpose

  struct Task {
    std::vector<int32_t> pages;
    int64_t length = 0;
    uint64_t bound_in = 0;  // number of the bind_tasks call that saw this task last
  };

  int64_t pages_for(int64_t num_tokens) const {
    return num_tokens / page_size_ + (num_tokens % page_size_ != 0 ? 1 : 0);
  }

  Task& find_task(int64_t task_id, const char* op);
  const Task& find_task(int64_t task_id, const char* op) const;
  std::span<const int32_t> full_pages(const char* op, int64_t task_id, int64_t first_token,
                                      std::span<const int64_t> tokens) const;
  void check_append(const char* op, int64_t task_id, int64_t num_new_tokens) const;
  void check_new_id(int64_t task_id, const char* op) const;
  void insert_task(int64_t task_id, std::span<const int32_t> pages, int64_t length);
  bool is_full_page(int32_t page, size_t index) const;

  int32_t take_free_page();
  void push_free_page(int32_t page);
  void unlink_free_page(int32_t page);
  void find_prefix(std::span<const int64_t> tokens, std::string_view salt) const;
  void drop_reference(int32_t page);
  void let_go(int32_t page);
  void shrink_list(Task& task, int64_t num_pages);

  void check_step_shape(const InferenceWorkspace& workspace, int64_t num_tasks, int64_t num_q_lens,
                        int64_t pad_to) const;
  StepMetadata plan_step(const InferenceWorkspace& workspace, std::span<const int64_t> task_ids,
                         std::span<const int64_t> q_lens, int64_t pad_to);
  void check_writable(const Task& task, int64_t task_id, int64_t q_len) const;
  void write_step(const InferenceWorkspace::StepArrays& out, std::span<const int64_t> q_lens,
                  const StepMetadata& step);

  std::vector<int32_t> count_holders() const;
  void check_states(const std::vector<int32_t>& holders) const;

  static constexpr int32_t kNotLinked = -1;

  int64_t num_pages_;
  int64_t page_size_;
  int64_t max_task_pages_ = 0;
  std::unordered_map<int64_t, Task> tasks_;
  std::vector<int32_t> ref_counts_;  // [num_pages]
  // The free list is a doubly linked queue through these arrays, so that a page can leave its
  // middle. Entry num_pages is the sentinel; kNotLinked marks a page that is not on the list.
  std::vector<int32_t> next_free_;  // [num_pages + 1]
  std::vector<int32_t> prev_free_;  // [num_pages + 1]
  int64_t num_free_pages_ = 0;
  std::vector<int32_t> parked_pages_;  // in the order in which they were let go
  std::vector<PageCopy> pending_copies_;
  PrefixIndex index_;
  mutable std::vector<int32_t> matched_pages_;  // scratch of match_prefix and adopt_prefix
  std::vector<const Task*> bound_tasks_;        // scratch of bind_tasks
  uint64_t bind_number_ = 0;
};

}  // namespace astrai::runtime
