// PagePool::check_integrity, which trusts none of the counts that the pool keeps.
#include <algorithm>
#include <vector>

#include "common/check.h"
#include "runtime/page_pool.h"

namespace astrai::runtime {

void PagePool::check_integrity() const {
  const std::vector<int32_t> holders = count_holders();
  for (int64_t page = 0; page < num_pages_; ++page) {
    ASTRAI_CHECK_STATE(ref_counts_[page] == holders[page], "page_pool: page ", page,
                       " has reference count ", ref_counts_[page], "; expected ", holders[page],
                       ", the number of task lists that hold it");
  }
  for (const auto& [task_id, task] : tasks_) {
    for (auto i = static_cast<size_t>(pages_for(task.length)); i < task.pages.size(); ++i) {
      ASTRAI_CHECK_STATE(holders[task.pages[i]] == 1, "page_pool: task ", task_id,
                         " reserved page ", task.pages[i], " past its length, but ",
                         holders[task.pages[i]], " lists hold it; expected 1");
    }
  }
  check_states(holders);
  index_.check_integrity();
}

// Counts in how many lists each page is, and checks that lists are well formed.
std::vector<int32_t> PagePool::count_holders() const {
  std::vector<int32_t> holders(static_cast<size_t>(num_pages_), 0);
  std::vector<size_t> places(static_cast<size_t>(num_pages_), 0);
  for (const auto& [task_id, task] : tasks_) {
    ASTRAI_CHECK_STATE(
        task.length >= 0 && pages_for(task.length) <= static_cast<int64_t>(task.pages.size()),
        "page_pool: task ", task_id, " has ", task.length, " tokens in ", task.pages.size(),
        " pages of ", page_size_, "; expected pages for all its tokens");
    for (size_t i = 0; i < task.pages.size(); ++i) {
      const int32_t page = task.pages[i];
      ASTRAI_CHECK_STATE(page >= 0 && page < num_pages_, "page_pool: task ", task_id,
                         " holds page ", page, "; expected 0 to ", num_pages_ - 1);
      ASTRAI_CHECK_STATE(holders[page] == 0 || places[page] == i, "page_pool: page ", page,
                         " is page ", i, " of task ", task_id, " and page ", places[page],
                         " elsewhere; expected the same place in every list");
      places[page] = i;
      ++holders[page];
    }
  }
  return holders;
}

// Checks that each page is in exactly one state: held, free or parked.
void PagePool::check_states(const std::vector<int32_t>& holders) const {
  const auto sentinel = static_cast<int32_t>(num_pages_);
  std::vector<bool> seen(static_cast<size_t>(num_pages_), false);
  int64_t num_free = 0;
  int32_t previous = sentinel;
  for (int32_t page = next_free_[sentinel]; page != sentinel; page = next_free_[page]) {
    ASTRAI_CHECK_STATE(page >= 0 && page < num_pages_ && prev_free_[page] == previous,
                       "page_pool: the free list is broken after entry ", num_free,
                       "; expected links that agree in both directions");
    ASTRAI_CHECK_STATE(!seen[page], "page_pool: page ", page,
                       " is on the free list twice; expected once");
    ASTRAI_CHECK_STATE(holders[page] == 0, "page_pool: page ", page, " is on the free list while ",
                       holders[page], " tasks hold it");
    seen[page] = true;
    previous = page;
    ++num_free;
  }
  ASTRAI_CHECK_STATE(prev_free_[sentinel] == previous && num_free == num_free_pages_,
                     "page_pool: the free list has ", num_free, " pages; expected ",
                     num_free_pages_, ", the count that is kept");
  for (int32_t page : parked_pages_) {
    const auto reads = [page](const PageCopy& copy) { return copy.src == page; };
    ASTRAI_CHECK_STATE(!seen[page] && holders[page] == 0 &&
                           std::any_of(pending_copies_.begin(), pending_copies_.end(), reads),
                       "page_pool: page ", page,
                       " is parked; expected a page that is neither held ",
                       "nor free and that a queued copy reads");
    seen[page] = true;
  }
  for (int64_t page = 0; page < num_pages_; ++page) {
    ASTRAI_CHECK_STATE(seen[page] || holders[page] > 0, "page_pool: page ", page,
                       " is neither held nor free nor parked; expected one of the three");
  }
  std::vector<bool> written(static_cast<size_t>(num_pages_), false);
  for (const PageCopy& copy : pending_copies_) {
    for (int32_t page : {copy.src, copy.dst}) {
      ASTRAI_CHECK_STATE(next_free_[page] == kNotLinked, "page_pool: page ", page,
                         " is free while a queued copy from ", copy.src, " to ", copy.dst,
                         " needs it");
    }
    ASTRAI_CHECK_STATE(!written[copy.dst], "page_pool: two queued copies write page ", copy.dst,
                       "; expected at most one");
    written[copy.dst] = true;
  }
}

}  // namespace astrai::runtime
