// Random sequences of pool operations against a model that knows only tokens.
//
// The model keeps each task's tokens; a storage array stands in for the KV pages. Steps write
// through the pool's page lists and copies are done when taken, so a page that is shared, freed or
// handed out wrongly shows as a token that changed under a task's feet.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <ostream>
#include <random>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/check.h"
#include "runtime/page_pool.h"
#include "runtime_test_support.h"

namespace astrai::runtime {

struct PagePoolTestAccess {
  static const std::vector<PageCopy>& copies(const PagePool& pool) { return pool.pending_copies_; }
};

namespace {

struct Config {
  int64_t num_pages;
  int64_t page_size;
  uint32_t seed;

  std::string name() const { return concat("pages", num_pages, "x", page_size, "_seed", seed); }
  friend void PrintTo(const Config& config, std::ostream* out) { *out << config.name(); }
};

class Simulation {
 public:
  explicit Simulation(const Config& config)
      : pool_(config.num_pages, config.page_size, config.seed % 2 ? 20 : 0),
        slots_(static_cast<size_t>(config.num_pages * config.page_size), -1),
        random_(config.seed) {}

  void run_one() {
    const int64_t choice = pick(0, 99);
    if (choice < 12) return add();
    if (choice < 20) return adopt();
    if (choice < 32) return fork();
    if (choice < 44) return reserve_only();
    if (choice < 72) return step();
    if (choice < 84) return truncate();
    if (choice < 88) return free_one();
    if (choice < 93) return index_one();
    if (choice < 98) return adopt_cached();
    do_copies();
  }

  void check() {
    pool_.check_integrity();
    std::vector<int64_t> holders(static_cast<size_t>(pool_.num_pages()), 0);
    for (const auto& [id, tokens] : tokens_) {
      ASSERT_EQ(pool_.length(id), static_cast<int64_t>(tokens.size()));
      for (int32_t page : pool_.pages(id)) ++holders[static_cast<size_t>(page)];
    }
    int64_t unheld = 0;
    for (int64_t page = 0; page < pool_.num_pages(); ++page) {
      ASSERT_EQ(pool_.ref_count(page), holders[static_cast<size_t>(page)]) << "page " << page;
      unheld += holders[static_cast<size_t>(page)] == 0;
    }
    ASSERT_EQ(pool_.num_tasks(), static_cast<int64_t>(tokens_.size()));
    ASSERT_EQ(pool_.num_free_pages() + pool_.num_parked_pages(), unheld);
    if (pool_.num_pending_copies() == 0) check_contents();
  }

  void drain() {
    while (!tokens_.empty()) {
      free_one();
      check();
    }
    ASSERT_EQ(pool_.num_free_pages(), pool_.num_pages());
    ASSERT_EQ(pool_.num_pending_copies(), 0);
    ASSERT_EQ(pool_.num_parked_pages(), 0);
  }

  // Without these the run would have proved little.
  int64_t num_copies = 0;
  int64_t num_cancelled = 0;
  int64_t num_parked = 0;
  int64_t num_refusals = 0;
  int64_t num_hits = 0;
  int64_t num_hits_of_freed_tasks = 0;

 private:
  int64_t pick(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }

  // A random task, or -1 when there is none.
  int64_t any_task() {
    if (tokens_.empty()) return -1;
    auto it = tokens_.begin();
    std::advance(it, pick(0, static_cast<int64_t>(tokens_.size()) - 1));
    return it->first;
  }

  bool room_for_a_task() const { return tokens_.size() < 9; }

  void add() {
    if (!room_for_a_task()) return;
    pool_.add_task(next_id_);
    tokens_[next_id_++] = {};
  }

  void adopt() {
    const int64_t donor = any_task();
    if (donor < 0 || !room_for_a_task()) return;
    const int64_t num_full = pool_.length(donor) / pool_.page_size();
    const int64_t num_shared = pick(0, num_full);
    const int64_t num_tokens = num_shared * pool_.page_size();
    pool_.add_task(next_id_, pool_.pages(donor).first(static_cast<size_t>(num_shared)), num_tokens);
    const std::vector<int64_t>& source = tokens_[donor];
    salts_[next_id_] = salt_of(donor);
    tokens_[next_id_++] = {source.begin(), source.begin() + num_tokens};
  }

  void index_one() {
    const int64_t id = any_task();
    if (id < 0) return;
    pool_.index_prefix(id, tokens_[id], salt_of(id));
    if (pool_.length(id) < pool_.page_size()) return;
    indexed_.emplace_back(id, tokens_[id]);
    if (indexed_.size() > 20) indexed_.erase(indexed_.begin());
  }

  // A task that begins like one which was indexed at some time, alive or not.
  void adopt_cached() {
    if (indexed_.empty() || !room_for_a_task()) return;
    const auto& [donor, known] = indexed_[static_cast<size_t>(pick(0, std::ssize(indexed_) - 1))];
    const int64_t length_wanted = pick(0, 1) == 0 ? std::ssize(known) : pick(0, std::ssize(known));
    std::vector<int64_t> wanted(known.begin(), known.begin() + length_wanted);
    if (pick(0, 3) != 0) wanted.push_back(-1);
    const PagePool::PrefixMatch match = pool_.match_prefix(wanted, salt_of(donor));
    const int64_t free_before = pool_.num_free_pages() + pool_.num_parked_pages();
    const int64_t length = pool_.adopt_prefix(next_id_, wanted, salt_of(donor));
    EXPECT_EQ(length, match.num_tokens);
    EXPECT_EQ(pool_.num_free_pages() + pool_.num_parked_pages(),
              free_before - match.num_unheld_pages);
    EXPECT_TRUE(length < std::ssize(wanted) || length == 0);
    EXPECT_EQ(pool_.match_prefix(wanted, "nobody's").num_tokens, 0);
    num_hits += length > 0;
    num_hits_of_freed_tasks += length > 0 && !tokens_.contains(donor);
    salts_[next_id_] = salt_of(donor);
    tokens_[next_id_++] = {wanted.begin(), wanted.begin() + length};
  }

  // Tasks that share pages share a salt.
  std::string salt_of(int64_t id) {
    const auto [entry, is_new] = salts_.try_emplace(id, pick(0, 1) == 0 ? "" : "tenant");
    return entry->second;
  }

  void fork() {
    const int64_t parent = any_task();
    if (parent < 0 || !room_for_a_task()) return;
    const int64_t child = next_id_++;
    pool_.fork(parent, child);
    tokens_[child] = tokens_[parent];
    salts_[child] = salt_of(parent);
    // Often the child goes on at once, and one of the two ends before its copy was done.
    if (pick(0, 2) == 0) return;
    reserve(child, pick(1, pool_.page_size()));
    const int64_t ending = pick(0, 3);
    if (ending < 2) free_task(ending == 0 ? parent : child);
  }

  bool reserve(int64_t id, int64_t num_new_tokens) {
    const int64_t page_size = pool_.page_size();
    const int64_t length = pool_.length(id);
    const std::span<const int32_t> before = pool_.pages(id);
    const std::vector<int32_t> old_pages(before.begin(), before.end());
    const std::vector<PageCopy> old_copies = PagePoolTestAccess::copies(pool_);
    const int64_t old_free = pool_.num_free_pages();
    int64_t needed = (length + num_new_tokens + page_size - 1) / page_size -
                     static_cast<int64_t>(old_pages.size());
    needed = std::max<int64_t>(needed, 0);
    if (num_new_tokens > 0 && length % page_size != 0 &&
        pool_.ref_count(old_pages[static_cast<size_t>(length / page_size)]) > 1) {
      ++needed;
    }
    const bool done = pool_.try_reserve(id, num_new_tokens);
    EXPECT_EQ(done, needed <= old_free);
    EXPECT_EQ(pool_.num_free_pages(), done ? old_free - needed : old_free);
    std::set<int32_t> busy;
    for (const PageCopy& copy : old_copies) busy.insert({copy.src, copy.dst});
    int64_t num_handed_out = 0;
    for (int32_t page : pool_.pages(id)) {
      if (std::find(old_pages.begin(), old_pages.end(), page) != old_pages.end()) continue;
      ++num_handed_out;
      EXPECT_FALSE(busy.contains(page)) << "page " << page << " handed out under a queued copy";
    }
    EXPECT_EQ(num_handed_out, done ? needed : 0);
    num_refusals += !done;
    return done;
  }

  void reserve_only() {
    const int64_t id = any_task();
    if (id >= 0) reserve(id, pick(0, 2 * pool_.page_size()));
  }

  void step() {
    std::map<int64_t, int64_t> q_lens;
    for (const auto& [id, tokens] : tokens_) {
      const int64_t q_len = pick(0, 2) == 0 ? pick(1, 2 * pool_.page_size()) : 1;
      if (pick(0, 1) == 0 && reserve(id, q_len)) q_lens[id] = q_len;
    }
    do_copies();
    for (const auto& [id, q_len] : q_lens) {
      std::vector<int64_t>& tokens = tokens_[id];
      for (int64_t i = 0; i < q_len; ++i) {
        const auto position = static_cast<int64_t>(tokens.size());
        const int32_t page = pool_.pages(id)[static_cast<size_t>(position / pool_.page_size())];
        ASSERT_EQ(pool_.ref_count(page), 1) << "a shared page would be written";
        slot(page, position % pool_.page_size()) = next_token_;
        tokens.push_back(next_token_++);
      }
      pool_.append(id, q_len);
    }
  }

  void truncate() {
    const int64_t id = any_task();
    if (id < 0) return;
    std::vector<int64_t>& tokens = tokens_[id];
    tokens.resize(static_cast<size_t>(pick(0, static_cast<int64_t>(tokens.size()))));
    watch_copies([&] { pool_.truncate(id, static_cast<int64_t>(tokens.size())); });
  }

  void free_one() {
    const int64_t id = any_task();
    if (id >= 0) free_task(id);
  }

  void free_task(int64_t id) {
    watch_copies([&] { pool_.free_task(id); });
    tokens_.erase(id);
  }

  template <class Fn>
  void watch_copies(Fn&& fn) {
    const int64_t before = pool_.num_pending_copies();
    fn();
    num_cancelled += before - pool_.num_pending_copies();
    num_parked += pool_.num_parked_pages();
  }

  void do_copies() {
    for (const PageCopy& copy : pool_.take_page_copies()) {
      ++num_copies;
      for (int64_t i = 0; i < copy.num_tokens; ++i) slot(copy.dst, i) = slot(copy.src, i);
    }
  }

  void check_contents() {
    for (const auto& [id, tokens] : tokens_) {
      for (size_t i = 0; i < tokens.size(); ++i) {
        const auto position = static_cast<int64_t>(i);
        const int32_t page = pool_.pages(id)[static_cast<size_t>(position / pool_.page_size())];
        ASSERT_EQ(slot(page, position % pool_.page_size()), tokens[i])
            << "task " << id << " position " << position;
      }
    }
  }

  int64_t& slot(int32_t page, int64_t offset) {
    return slots_.at(static_cast<size_t>(page * pool_.page_size() + offset));
  }

  PagePool pool_;
  std::vector<int64_t> slots_;
  std::map<int64_t, std::vector<int64_t>> tokens_;
  std::map<int64_t, std::string> salts_;
  std::vector<std::pair<int64_t, std::vector<int64_t>>> indexed_;
  std::mt19937 random_;
  int64_t next_id_ = 0;
  int64_t next_token_ = 0;
};

class PagePoolRandom : public ::testing::TestWithParam<Config> {};

TEST_P(PagePoolRandom, NoSequenceOfOperationsDisturbsATask) {
  constexpr int kOperations = 40000;
  Simulation simulation(GetParam());
  for (int i = 0; i < kOperations; ++i) {
    SCOPED_TRACE(concat("seed ", GetParam().seed, ", operation ", i));
    simulation.run_one();
    simulation.check();
    if (HasFailure()) return;
  }
  simulation.drain();
  EXPECT_GT(simulation.num_refusals, 0);
  EXPECT_GT(simulation.num_hits, 0);
  EXPECT_GT(simulation.num_hits_of_freed_tasks, 0);
  if (GetParam().page_size > 1) {  // a page of one token is never partly filled
    EXPECT_GT(simulation.num_copies, 0);
    EXPECT_GT(simulation.num_cancelled, 0);
    EXPECT_GT(simulation.num_parked, 0);
  } else {
    EXPECT_EQ(simulation.num_copies, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Pools, PagePoolRandom,
                         ::testing::Values(Config{12, 1, 11}, Config{10, 3, 12}, Config{10, 3, 13},
                                           Config{24, 4, 14}, Config{24, 4, 15}, Config{9, 16, 16},
                                           Config{40, 2, 17}),
                         [](const auto& info) { return info.param.name(); });

}  // namespace
}  // namespace astrai::runtime
