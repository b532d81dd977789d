#include "runtime/page_pool.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "common/check.h"
#include "common/counters.h"

namespace astrai::runtime {
namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

constexpr const char* kOtherPath =
    " holds a page that is indexed with other tokens or under another salt; expected the tokens "
    "that it was indexed with";

// Room for `size` entries; growth is at least twofold and counted.
template <class T>
void reserve_counted(std::vector<T>& list, size_t size) {
  if (list.capacity() >= size) return;
  list.reserve(std::max(size, 2 * list.capacity()));
  count(counters().host_allocations);
}

int64_t checked_size(const char* name, int64_t value) {
  ASTRAI_CHECK_ARG(value >= 1 && value <= kMaxInt32, "page_pool: ", name, " is ", value,
                   "; expected 1 to ", kMaxInt32);
  return value;
}

}  // namespace

PagePool::PagePool(int64_t num_pages, int64_t page_size, int64_t max_task_tokens)
    : num_pages_(checked_size("num_pages", num_pages)),
      page_size_(checked_size("page_size", page_size)),
      index_(num_pages, page_size) {
  ASTRAI_CHECK_ARG(max_task_tokens >= 0, "page_pool: max_task_tokens is ", max_task_tokens,
                   "; expected 0 or more");
  max_task_pages_ =
      std::min(num_pages, max_task_tokens / page_size + (max_task_tokens % page_size != 0));
  const auto size = static_cast<size_t>(num_pages);
  ref_counts_.assign(size, 0);
  next_free_.assign(size + 1, kNotLinked);
  prev_free_.assign(size + 1, kNotLinked);
  next_free_[size] = prev_free_[size] = static_cast<int32_t>(num_pages);
  for (int64_t page = 0; page < num_pages; ++page) push_free_page(static_cast<int32_t>(page));
}

// ---- free list
// ------------------------------------------------------------------------------------

void PagePool::push_free_page(int32_t page) {
  const auto sentinel = static_cast<int32_t>(num_pages_);
  const int32_t last = prev_free_[sentinel];
  next_free_[last] = page;
  prev_free_[page] = last;
  next_free_[page] = sentinel;
  prev_free_[sentinel] = page;
  ++num_free_pages_;
}

void PagePool::unlink_free_page(int32_t page) {
  next_free_[prev_free_[page]] = next_free_[page];
  prev_free_[next_free_[page]] = prev_free_[page];
  next_free_[page] = prev_free_[page] = kNotLinked;
  --num_free_pages_;
}

// The page that has been free for longest, for new contents.
int32_t PagePool::take_free_page() {
  const int32_t page = next_free_[static_cast<size_t>(num_pages_)];
  unlink_free_page(page);
  index_.forget(page);
  ref_counts_[page] = 1;
  return page;
}

void PagePool::drop_reference(int32_t page) {
  if (--ref_counts_[page] == 0) let_go(page);
}

// Cancelling the copy into `page` may leave the page that it read without a reader, so that page
// may be next.
void PagePool::let_go(int32_t page) {
  for (;;) {
    const auto reads = [page](const PageCopy& copy) { return copy.src == page; };
    if (std::any_of(pending_copies_.begin(), pending_copies_.end(), reads)) {
      parked_pages_.push_back(page);  // room was made when the copy was queued
      return;
    }
    push_free_page(page);
    const auto copy = std::find_if(pending_copies_.begin(), pending_copies_.end(),
                                   [page](const PageCopy& copy) { return copy.dst == page; });
    if (copy == pending_copies_.end()) return;
    page = copy->src;
    pending_copies_.erase(copy);
    const auto parked = std::find(parked_pages_.begin(), parked_pages_.end(), page);
    if (parked == parked_pages_.end()) return;
    parked_pages_.erase(parked);
  }
}

void PagePool::shrink_list(Task& task, int64_t num_pages) {
  while (static_cast<int64_t>(task.pages.size()) > num_pages) {
    const int32_t page = task.pages.back();
    task.pages.pop_back();
    drop_reference(page);
  }
}

// ---- tasks
// ----------------------------------------------------------------------------------------

const PagePool::Task& PagePool::find_task(int64_t task_id, const char* op) const {
  const auto found = tasks_.find(task_id);
  ASTRAI_CHECK_ARG(found != tasks_.end(), op, ": task_id ", task_id,
                   " is unknown; expected a task that was added and not yet freed");
  return found->second;
}

PagePool::Task& PagePool::find_task(int64_t task_id, const char* op) {
  return const_cast<Task&>(std::as_const(*this).find_task(task_id, op));
}

void PagePool::check_new_id(int64_t task_id, const char* op) const {
  ASTRAI_CHECK_ARG(!has_task(task_id), op, ": task_id ", task_id,
                   " is in use; expected an id without a task");
}

// Adds a task that holds `pages` from now on.
void PagePool::insert_task(int64_t task_id, std::span<const int32_t> pages, int64_t length) {
  Task task;
  const size_t room = std::max(pages.size(), static_cast<size_t>(max_task_pages_));
  if (room > 0) reserve_counted(task.pages, room);
  task.pages.assign(pages.begin(), pages.end());
  task.length = length;
  const auto inserted = tasks_.emplace(task_id, std::move(task)).first;
  count(counters().host_allocations);
  for (int32_t page : inserted->second.pages) ++ref_counts_[page];
}

void PagePool::add_task(int64_t task_id) {
  check_new_id(task_id, "add_task");
  insert_task(task_id, {}, 0);
}

bool PagePool::is_full_page(int32_t page, size_t index) const {
  const int64_t tokens = static_cast<int64_t>(index + 1) * page_size_;
  return std::any_of(tasks_.begin(), tasks_.end(), [&](const auto& entry) {
    const Task& task = entry.second;
    return task.length >= tokens && task.pages[index] == page;
  });
}

void PagePool::add_task(int64_t task_id, std::span<const int32_t> shared_pages,
                        int64_t num_tokens) {
  check_new_id(task_id, "add_task");
  const auto num_shared = static_cast<int64_t>(shared_pages.size());
  ASTRAI_CHECK_ARG(
      num_tokens >= 0 && num_tokens % page_size_ == 0 && num_tokens / page_size_ == num_shared,
      "add_task: num_tokens is ", num_tokens, " with ", num_shared, " shared pages of ", page_size_,
      " tokens; expected ", num_shared * page_size_);
  for (size_t index = 0; index < shared_pages.size(); ++index) {
    const int32_t page = shared_pages[index];
    ASTRAI_CHECK_ARG(page >= 0 && page < num_pages_, "add_task: shared_pages[", index, "] is ",
                     page, "; expected 0 to ", num_pages_ - 1);
    ASTRAI_CHECK_ARG(is_full_page(page, index), "add_task: shared_pages[", index, "] is page ",
                     page, ", which no task has filled as its page ", index,
                     "; expected a full page at the same place of a live task");
  }
  insert_task(task_id, shared_pages, num_tokens);
}

// ---- prefixes
// -------------------------------------------------------------------------------------

// Leaves the pages in matched_pages_.
void PagePool::find_prefix(std::span<const int64_t> tokens, std::string_view salt) const {
  matched_pages_.clear();
  if (tokens.empty()) return;
  const int64_t before_last = static_cast<int64_t>(tokens.size()) - 1;
  index_.match(tokens, salt, before_last / page_size_, matched_pages_);
}

PagePool::PrefixMatch PagePool::match_prefix(std::span<const int64_t> tokens,
                                             std::string_view salt) const {
  find_prefix(tokens, salt);
  PrefixMatch match;
  for (int32_t page : matched_pages_) {
    match.num_tokens += page_size_;
    match.num_unheld_pages += ref_counts_[page] == 0;
  }
  return match;
}

int64_t PagePool::adopt_prefix(int64_t task_id, std::span<const int64_t> tokens,
                               std::string_view salt) {
  check_new_id(task_id, "adopt_prefix");
  find_prefix(tokens, salt);
  const int64_t num_tokens = static_cast<int64_t>(matched_pages_.size()) * page_size_;
  insert_task(task_id, matched_pages_, num_tokens);
  for (int32_t page : matched_pages_) {
    if (ref_counts_[page] > 1) continue;  // others hold it too
    if (next_free_[page] != kNotLinked) {
      unlink_free_page(page);
    } else {
      parked_pages_.erase(std::find(parked_pages_.begin(), parked_pages_.end(), page));
    }
  }
  return num_tokens;
}

std::span<const int32_t> PagePool::full_pages(const char* op, int64_t task_id, int64_t first_token,
                                              std::span<const int64_t> tokens) const {
  const Task& task = find_task(task_id, op);
  const int64_t num_full = task.length / page_size_;
  const auto num_tokens = static_cast<int64_t>(tokens.size());
  const int64_t missing = num_full * page_size_ - first_token;
  ASTRAI_CHECK_ARG(num_tokens >= missing, op, ": tokens has ", num_tokens,
                   " entries; expected at least ", missing,
                   ", to the end of the last full page of ", "task ", task_id);
  return std::span(task.pages)
      .subspan(static_cast<size_t>(first_token / page_size_),
               static_cast<size_t>(std::max<int64_t>(0, missing) / page_size_));
}

void PagePool::index_prefix(int64_t task_id, std::span<const int64_t> tokens,
                            std::string_view salt) {
  const auto pages = full_pages("index_prefix", task_id, 0, tokens);
  ASTRAI_CHECK_ARG(index_.insert(tokens, pages, salt), "index_prefix: task ", task_id, kOtherPath);
}

bool PagePool::extend_indexed(int64_t task_id, int64_t first_token,
                              std::span<const int64_t> tokens) {
  const Task& task = find_task(task_id, "extend_indexed");
  const auto before = first_token / page_size_ - 1;
  ASTRAI_CHECK_ARG(first_token % page_size_ == 0 && before >= 0 && first_token <= task.length,
                   "extend_indexed: first_token is ", first_token, "; expected a multiple of ",
                   page_size_, " from ", page_size_, " to ", task.length, ", the length of task ",
                   task_id);
  const auto pages = full_pages("extend_indexed", task_id, first_token, tokens);
  const int32_t parent = task.pages[static_cast<size_t>(before)];
  if (!index_.contains(parent)) return false;
  ASTRAI_CHECK_ARG(index_.insert_below(parent, tokens, pages), "extend_indexed: task ", task_id,
                   kOtherPath);
  return true;
}

void PagePool::clear_prefixes() {
  for (int64_t page = 0; page < num_pages_; ++page) index_.forget(static_cast<int32_t>(page));
}

void PagePool::fork(int64_t parent, int64_t child) {
  const Task& source = find_task(parent, "fork");
  check_new_id(child, "fork");
  const auto with_tokens = static_cast<size_t>(pages_for(source.length));
  insert_task(child, std::span(source.pages).first(with_tokens), source.length);
}

bool PagePool::try_reserve(int64_t task_id, int64_t num_new_tokens) {
  Task& task = find_task(task_id, "try_reserve");
  ASTRAI_CHECK_ARG(num_new_tokens >= 0, "try_reserve: num_new_tokens is ", num_new_tokens,
                   "; expected 0 or more");
  if (num_new_tokens == 0) return true;
  if (num_new_tokens > num_pages_ * page_size_) return false;  // and the sum below cannot overflow
  const int64_t wanted = pages_for(task.length + num_new_tokens);
  const int64_t missing = std::max<int64_t>(0, wanted - static_cast<int64_t>(task.pages.size()));
  const int64_t tail_tokens = task.length % page_size_;
  const auto tail = static_cast<size_t>(task.length / page_size_);
  const bool copy_tail = tail_tokens != 0 && ref_counts_[task.pages[tail]] > 1;
  if (missing + (copy_tail ? 1 : 0) > num_free_pages_) return false;

  // All memory first: nothing below can fail half-way.
  reserve_counted(task.pages, static_cast<size_t>(wanted));
  if (copy_tail) {
    // A parked page is the source of a queued copy, so there are never more of them than copies.
    reserve_counted(pending_copies_, pending_copies_.size() + 1);
    reserve_counted(parked_pages_, pending_copies_.size() + 1);
    const int32_t shared = task.pages[tail];
    const int32_t own = take_free_page();
    pending_copies_.push_back({.src = shared, .dst = own, .num_tokens = tail_tokens});
    task.pages[tail] = own;
    --ref_counts_[shared];  // another task still holds it
  }
  // A page that was full and was truncated into may be written from here on.
  if (tail_tokens != 0 && !copy_tail) index_.forget(task.pages[tail]);
  for (int64_t i = 0; i < missing; ++i) task.pages.push_back(take_free_page());
  return true;
}

int64_t PagePool::try_reserve_one_each(std::span<const int64_t> task_ids) {
  for (int64_t id : task_ids) find_task(id, "try_reserve_one_each");
  int64_t done = 0;
  for (int64_t id : task_ids) {
    if (!try_reserve(id, 1)) break;
    ++done;
  }
  return done;
}

void PagePool::check_append(const char* op, int64_t task_id, int64_t num_new_tokens) const {
  const Task& task = find_task(task_id, op);
  const int64_t room = static_cast<int64_t>(task.pages.size()) * page_size_ - task.length;
  ASTRAI_CHECK_ARG(num_new_tokens >= 0 && num_new_tokens <= room, op, ": num_new_tokens is ",
                   num_new_tokens, " for task ", task_id, " of ", task.length, " tokens in ",
                   task.pages.size(), " pages; expected 0 to ", room);
}

void PagePool::append(int64_t task_id, int64_t num_new_tokens) {
  check_append("append", task_id, num_new_tokens);
  find_task(task_id, "append").length += num_new_tokens;
}

void PagePool::append_each(std::span<const int64_t> task_ids,
                           std::span<const int64_t> nums_new_tokens) {
  ASTRAI_CHECK_ARG(task_ids.size() == nums_new_tokens.size(), "append_each: nums_new_tokens has ",
                   nums_new_tokens.size(), " entries; expected ", task_ids.size(),
                   ", one for each task");
  for (size_t i = 0; i < task_ids.size(); ++i) {
    check_append("append_each", task_ids[i], nums_new_tokens[i]);
  }
  for (size_t i = 0; i < task_ids.size(); ++i) {
    find_task(task_ids[i], "append_each").length += nums_new_tokens[i];
  }
}

void PagePool::truncate(int64_t task_id, int64_t num_tokens) {
  Task& task = find_task(task_id, "truncate");
  ASTRAI_CHECK_ARG(num_tokens >= 0 && num_tokens <= task.length, "truncate: num_tokens is ",
                   num_tokens, "; expected 0 to ", task.length, ", the length of task ", task_id);
  task.length = num_tokens;
  shrink_list(task, pages_for(num_tokens));
}

void PagePool::free_task(int64_t task_id) {
  shrink_list(find_task(task_id, "free_task"), 0);
  tasks_.erase(task_id);
}

int64_t PagePool::length(int64_t task_id) const {
  return find_task(task_id, "length").length;
}

std::span<const int32_t> PagePool::pages(int64_t task_id) const {
  return find_task(task_id, "pages").pages;
}

int64_t PagePool::ref_count(int64_t page) const {
  ASTRAI_CHECK_ARG(page >= 0 && page < num_pages_, "ref_count: page is ", page, "; expected 0 to ",
                   num_pages_ - 1);
  return ref_counts_[static_cast<size_t>(page)];
}

std::vector<PageCopy> PagePool::take_page_copies() {
  std::vector<PageCopy> copies;
  if (!pending_copies_.empty()) take_page_copies(copies);
  return copies;
}

void PagePool::take_page_copies(std::vector<PageCopy>& copies) {
  copies.clear();
  copies.swap(pending_copies_);
  for (int32_t page : parked_pages_) push_free_page(page);
  parked_pages_.clear();
}

// ---- steps
// ----------------------------------------------------------------------------------------

StepMetadata PagePool::bind_tasks(const InferenceWorkspace& workspace,
                                  std::span<const int64_t> task_ids,
                                  std::span<const int64_t> q_lens, int64_t pad_to) {
  const StepMetadata step = plan_step(workspace, task_ids, q_lens, pad_to);
  write_step(workspace.step_arrays(), q_lens, step);
  return step;
}

// What can be refused by looking at the call alone.
void PagePool::check_step_shape(const InferenceWorkspace& workspace, int64_t num_tasks,
                                int64_t num_q_lens, int64_t pad_to) const {
  const WorkspaceShape& shape = workspace.shape();
  ASTRAI_CHECK_ARG(shape.page_size == page_size_, "bind_tasks: workspace has page_size ",
                   shape.page_size, "; expected ", page_size_, ", that of the pool");
  ASTRAI_CHECK_ARG(num_tasks == num_q_lens, "bind_tasks: q_lens has ", num_q_lens,
                   " entries; expected ", num_tasks, ", one for each task");
  ASTRAI_CHECK_ARG(pad_to == 0 || pad_to >= num_tasks, "bind_tasks: pad_to is ", pad_to,
                   "; expected 0 or at least ", num_tasks, ", the number of tasks");
  const int64_t num_rows = std::max(num_tasks, pad_to);
  ASTRAI_CHECK_ARG(num_rows >= 1,
                   "bind_tasks: task_ids is empty; expected at least one task, or pad_to");
  ASTRAI_CHECK_ARG(num_rows <= shape.max_batch, "bind_tasks: the step has ", num_rows,
                   " tasks with padding; expected at most ", shape.max_batch, " (max_batch)");
  ASTRAI_CHECK_STATE(pending_copies_.empty(), "bind_tasks: ", pending_copies_.size(),
                     " page copies are queued; expected take_page_copies() to have been called ",
                     "and its copies to be done before the step");
}

StepMetadata PagePool::plan_step(const InferenceWorkspace& workspace,
                                 std::span<const int64_t> task_ids, std::span<const int64_t> q_lens,
                                 int64_t pad_to) {
  const WorkspaceShape& shape = workspace.shape();
  StepMetadata step;
  step.num_tasks = static_cast<int64_t>(task_ids.size());
  check_step_shape(workspace, step.num_tasks, static_cast<int64_t>(q_lens.size()), pad_to);
  step.num_rows = std::max(step.num_tasks, pad_to);
  const int64_t padding = step.num_rows - step.num_tasks;
  step.max_q_len = padding > 0 ? 1 : 0;
  step.is_decode = true;
  reserve_counted(bound_tasks_, static_cast<size_t>(shape.max_batch));
  bound_tasks_.clear();
  ++bind_number_;
  for (size_t i = 0; i < task_ids.size(); ++i) {
    const int64_t q_len = q_lens[i];
    Task& task = find_task(task_ids[i], "bind_tasks");
    ASTRAI_CHECK_ARG(task.bound_in != bind_number_, "bind_tasks: task ", task_ids[i],
                     " is in task_ids twice; expected each task once");
    task.bound_in = bind_number_;
    ASTRAI_CHECK_ARG(q_len >= 1, "bind_tasks: q_lens[", i, "] is ", q_len, "; expected at least 1");
    // Written as a difference, for q_len may be anything.
    ASTRAI_CHECK_ARG(q_len <= shape.max_step_tokens - padding - step.num_tokens,
                     "bind_tasks: the step has more than ", shape.max_step_tokens,
                     " tokens: q_lens[", i, "] is ", q_len, " after ", step.num_tokens,
                     " tokens, with ", padding, " padding rows; expected at most ",
                     shape.max_step_tokens, " in total (max_step_tokens)");
    const int64_t kv_len = task.length + q_len;
    ASTRAI_CHECK_ARG(kv_len <= shape.max_context, "bind_tasks: task ", task_ids[i], " would have ",
                     kv_len, " tokens; expected at most ", shape.max_context, " (max_context)");
    check_writable(task, task_ids[i], q_len);
    bound_tasks_.push_back(&task);
    step.num_tokens += q_len;
    step.num_pages_used += pages_for(kv_len);
    step.max_q_len = std::max(step.max_q_len, q_len);
    step.max_kv_len = std::max(step.max_kv_len, kv_len);
    step.is_decode = step.is_decode && q_len == 1;
  }
  step.num_row_tokens = step.num_tokens + padding;
  const InferenceWorkspace::StepArrays& arrays = workspace.step_arrays();
  // Follows from max_batch and max_context; it is what keeps the writes inside the slab.
  ASTRAI_CHECK_STATE(step.num_pages_used <= arrays.kv_indices_capacity, "bind_tasks: the step has ",
                     step.num_pages_used, " page table entries; expected at most ",
                     arrays.kv_indices_capacity);
  step.metadata_bytes =
      arrays.kv_indices_offset + step.num_pages_used * static_cast<int64_t>(sizeof(int32_t));
  return step;
}

void PagePool::check_writable(const Task& task, int64_t task_id, int64_t q_len) const {
  const int64_t kv_len = task.length + q_len;
  const auto num_held = static_cast<int64_t>(task.pages.size());
  const int64_t needed = pages_for(kv_len);
  ASTRAI_CHECK_ARG(needed <= num_held, "bind_tasks: task ", task_id, " holds ", num_held,
                   " pages of ", page_size_, " tokens for ", kv_len, " tokens; expected ", needed,
                   " pages, reserved by try_reserve");
  for (int64_t index = task.length / page_size_; index < needed; ++index) {
    const int32_t page = task.pages[static_cast<size_t>(index)];
    ASTRAI_CHECK_STATE(ref_counts_[page] == 1, "bind_tasks: task ", task_id, " would write page ",
                       page, ", which ", ref_counts_[page],
                       " tasks hold; expected try_reserve to have given it a page of its own");
  }
}

void PagePool::write_step(const InferenceWorkspace::StepArrays& out,
                          std::span<const int64_t> q_lens, const StepMetadata& step) {
  int64_t row = 0;
  int64_t entry = 0;
  for (int64_t i = 0; i < step.num_tasks; ++i) {
    const Task& task = *bound_tasks_[static_cast<size_t>(i)];
    const int64_t kv_len = task.length + q_lens[static_cast<size_t>(i)];
    const int64_t num_pages = pages_for(kv_len);
    out.qo_indptr[i] = static_cast<int32_t>(row);
    out.kv_indptr[i] = static_cast<int32_t>(entry);
    out.kv_lens[i] = static_cast<int32_t>(kv_len);
    std::memcpy(out.kv_indices + entry, task.pages.data(),
                static_cast<size_t>(num_pages) * sizeof(int32_t));
    entry += num_pages;
    auto page = static_cast<size_t>(task.length / page_size_);
    index_.forget(task.pages[page]);  // it is written from here on; those after it are new
    int64_t offset = task.length % page_size_;
    for (int64_t position = task.length; position < kv_len; ++page, offset = 0) {
      const int64_t first_slot = task.pages[page] * page_size_;
      for (; offset < page_size_ && position < kv_len; ++offset, ++position, ++row) {
        out.positions[row] = position;
        out.slot_mapping[row] = first_slot + offset;
      }
    }
    out.last_rows[i] = row - 1;
  }
  for (int64_t i = step.num_tasks; i < step.num_rows; ++i, ++row) {
    out.qo_indptr[i] = static_cast<int32_t>(row);
    out.kv_indptr[i] = static_cast<int32_t>(entry);
    out.kv_lens[i] = 0;
    out.positions[row] = 0;
    out.slot_mapping[row] = -1;
    out.last_rows[i] = row;
  }
  out.qo_indptr[step.num_rows] = static_cast<int32_t>(row);
  out.kv_indptr[step.num_rows] = static_cast<int32_t>(entry);
}

}  // namespace astrai::runtime
