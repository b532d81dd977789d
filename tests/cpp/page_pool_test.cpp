#include "runtime/page_pool.h"

#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "runtime_test_support.h"
#include "support/expect_error.h"

namespace astrai::runtime {

// Reaches into a pool to break it, or to see what is queued.
struct PagePoolTestAccess {
  static std::vector<int32_t>& ref_counts(PagePool& pool) { return pool.ref_counts_; }
  static std::vector<int32_t>& next_free(PagePool& pool) { return pool.next_free_; }
  static std::vector<int32_t>& prev_free(PagePool& pool) { return pool.prev_free_; }
  static std::vector<int32_t>& parked(PagePool& pool) { return pool.parked_pages_; }
  static std::vector<PageCopy>& copies(PagePool& pool) { return pool.pending_copies_; }
  static std::vector<int32_t>& list(PagePool& pool, int64_t id) { return pool.tasks_.at(id).pages; }
  static int64_t& length(PagePool& pool, int64_t id) { return pool.tasks_.at(id).length; }
  static int64_t& num_free(PagePool& pool) { return pool.num_free_pages_; }
  static void push_free(PagePool& pool, int32_t page) { pool.push_free_page(page); }
  static int32_t take_free(PagePool& pool) { return pool.take_free_page(); }
};

namespace {

using Access = PagePoolTestAccess;
using astrai::testing::expect_error;
using Pages = std::vector<int32_t>;

Pages pages_of(const PagePool& pool, int64_t task_id) {
  const std::span<const int32_t> pages = pool.pages(task_id);
  return {pages.begin(), pages.end()};
}

// Adds tokens as a step would: reserve, then append.
void grow(PagePool& pool, int64_t task_id, int64_t num_tokens) {
  ASSERT_TRUE(pool.try_reserve(task_id, num_tokens));
  pool.append(task_id, num_tokens);
}

// ---- pages and tasks
// ------------------------------------------------------------------------------

TEST(PagePool, StartsWithAllPagesFree) {
  const PagePool pool(5, 4);
  EXPECT_EQ(pool.num_pages(), 5);
  EXPECT_EQ(pool.page_size(), 4);
  EXPECT_EQ(pool.num_free_pages(), 5);
  EXPECT_EQ(pool.num_tasks(), 0);
  for (int64_t page = 0; page < 5; ++page) EXPECT_EQ(pool.ref_count(page), 0);
  pool.check_integrity();
}

TEST(PagePool, ReserveTakesJustThePagesThatTokensNeed) {
  PagePool pool(5, 4);
  pool.add_task(7);
  EXPECT_TRUE(pool.try_reserve(7, 0));
  EXPECT_EQ(pages_of(pool, 7), Pages{});
  EXPECT_TRUE(pool.try_reserve(7, 4));
  EXPECT_EQ(pages_of(pool, 7), Pages{0});
  EXPECT_TRUE(pool.try_reserve(7, 5));  // nothing was appended: five tokens in all
  EXPECT_EQ(pages_of(pool, 7), (Pages{0, 1}));
  pool.append(7, 5);
  EXPECT_EQ(pool.length(7), 5);
  EXPECT_TRUE(pool.try_reserve(7, 3));
  EXPECT_EQ(pages_of(pool, 7), (Pages{0, 1}));
  EXPECT_TRUE(pool.try_reserve(7, 1));  // asking for less gives nothing back
  EXPECT_EQ(pages_of(pool, 7), (Pages{0, 1}));
  EXPECT_EQ(pool.num_free_pages(), 3);
  pool.check_integrity();
}

TEST(PagePool, ReserveIsAllOrNothing) {
  PagePool pool(3, 4);
  pool.add_task(1);
  pool.add_task(2);
  grow(pool, 1, 4);
  EXPECT_FALSE(pool.try_reserve(2, 9));
  EXPECT_EQ(pages_of(pool, 2), Pages{});
  EXPECT_EQ(pool.num_free_pages(), 2);
  EXPECT_FALSE(pool.try_reserve(2, int64_t{1} << 62));
  EXPECT_TRUE(pool.try_reserve(2, 8));
  EXPECT_FALSE(pool.try_reserve(1, 1));
  EXPECT_EQ(pages_of(pool, 1), Pages{0});
  pool.check_integrity();
}

TEST(PagePool, FreedPagesAreReusedOldestFirstAndTailsBeforeHeads) {
  PagePool pool(6, 2);
  pool.add_task(1);
  pool.add_task(2);
  grow(pool, 1, 6);  // pages 0 1 2
  grow(pool, 2, 4);  // pages 3 4
  pool.free_task(2);
  pool.free_task(1);
  pool.add_task(3);
  grow(pool, 3, 12);
  EXPECT_EQ(pages_of(pool, 3), (Pages{5, 4, 3, 2, 1, 0}));
}

TEST(PagePool, ReserveOneEachStopsWherePagesRunOut) {
  PagePool pool(3, 2);
  for (int64_t id : {7, 8, 9}) pool.add_task(id);
  grow(pool, 7, 2);
  const std::vector<int64_t> ids{7, 8, 9};
  EXPECT_EQ(pool.try_reserve_one_each(ids), 2);  // a second page for 7, one for 8, none for 9
  EXPECT_EQ(pool.pages(7).size(), 2u);
  EXPECT_EQ(pool.pages(8).size(), 1u);
  EXPECT_EQ(pool.pages(9).size(), 0u);
  EXPECT_EQ(pool.try_reserve_one_each(ids), 2);  // what is reserved already costs nothing
  EXPECT_EQ(pool.try_reserve_one_each({}), 0);
  const std::vector<int64_t> unknown{7, 4};
  expect_error<std::invalid_argument>(
      "try_reserve_one_each: task_id 4 is unknown; expected a task that was added and not yet "
      "freed",
      [&] { (void)pool.try_reserve_one_each(unknown); });
  pool.check_integrity();
}

TEST(PagePool, AppendEachCountsAllOrNothing) {
  PagePool pool(3, 2);
  for (int64_t id : {7, 8}) {
    pool.add_task(id);
    ASSERT_TRUE(pool.try_reserve(id, 2));
  }
  const std::vector<int64_t> ids{7, 8}, good{2, 1}, bad{0, 2}, few{1};
  pool.append_each(ids, good);
  EXPECT_EQ(pool.length(7), 2);
  EXPECT_EQ(pool.length(8), 1);
  expect_error<std::invalid_argument>(
      "append_each: num_new_tokens is 2 for task 8 of 1 tokens in 1 pages; expected 0 to 1",
      [&] { pool.append_each(ids, bad); });
  expect_error<std::invalid_argument>(
      "append_each: nums_new_tokens has 1 entries; expected 2, one for each task",
      [&] { pool.append_each(ids, few); });
  EXPECT_EQ(pool.length(7), 2);
  EXPECT_EQ(pool.length(8), 1);
  pool.check_integrity();
}

TEST(PagePool, TruncateFreesWholePagesAndReservedOnes) {
  PagePool pool(6, 4);
  pool.add_task(1);
  grow(pool, 1, 10);
  ASSERT_TRUE(pool.try_reserve(1, 10));
  EXPECT_EQ(pool.num_free_pages(), 1);
  pool.truncate(1, 10);
  EXPECT_EQ(pages_of(pool, 1), (Pages{0, 1, 2}));
  pool.truncate(1, 5);
  EXPECT_EQ(pages_of(pool, 1), (Pages{0, 1}));
  EXPECT_EQ(pool.length(1), 5);
  pool.truncate(1, 4);
  EXPECT_EQ(pages_of(pool, 1), Pages{0});
  pool.truncate(1, 0);
  EXPECT_EQ(pages_of(pool, 1), Pages{});
  EXPECT_EQ(pool.num_free_pages(), 6);
  pool.check_integrity();
}

TEST(PagePool, ForkSharesPagesButNotReservedOnes) {
  PagePool pool(6, 4);
  pool.add_task(1);
  grow(pool, 1, 6);
  ASSERT_TRUE(pool.try_reserve(1, 7));
  pool.fork(1, 2);
  EXPECT_EQ(pages_of(pool, 1), (Pages{0, 1, 2, 3}));
  EXPECT_EQ(pages_of(pool, 2), (Pages{0, 1}));
  EXPECT_EQ(pool.length(2), 6);
  EXPECT_EQ(pool.ref_count(0), 2);
  EXPECT_EQ(pool.ref_count(2), 1);
  EXPECT_EQ(pool.num_free_pages(), 2);
  pool.check_integrity();
  pool.free_task(1);
  EXPECT_EQ(pool.ref_count(1), 1);
  EXPECT_EQ(pool.num_free_pages(), 4);
  pool.check_integrity();
}

TEST(PagePool, AdoptedPrefixIsSharedAndNeverCopied) {
  PagePool pool(6, 4);
  pool.add_task(1);
  grow(pool, 1, 9);
  pool.add_task(2, Pages{0, 1}, 8);
  EXPECT_EQ(pool.length(2), 8);
  EXPECT_EQ(pool.ref_count(0), 2);
  EXPECT_EQ(pool.ref_count(2), 1);
  grow(pool, 2, 3);
  EXPECT_EQ(pages_of(pool, 2), (Pages{0, 1, 3}));
  EXPECT_EQ(pool.num_pending_copies(), 0);
  pool.add_task(3, Pages{}, 0);
  EXPECT_EQ(pool.length(3), 0);
  pool.check_integrity();
}

TEST(PagePool, RefusesToAdoptWhatIsNotAFullPageAtItsPlace) {
  PagePool pool(6, 4);
  pool.add_task(1);
  grow(pool, 1, 9);  // pages 0 and 1 are full, page 2 is not
  const struct {
    Pages pages;
    int64_t num_tokens;
    const char* found;
  } cases[] = {
      {{0, 1}, 7, "num_tokens is 7 with 2 shared pages of 4 tokens; expected 8"},
      {{0, 1}, 4, "num_tokens is 4 with 2 shared pages of 4 tokens; expected 8"},
      {{0}, -4, "num_tokens is -4"},
      {{0, 6}, 8, "shared_pages[1] is 6; expected 0 to 5"},
      {{-1}, 4, "shared_pages[0] is -1; expected 0 to 5"},
      {{0, 1, 2}, 12, "shared_pages[2] is page 2, which no task has filled as its page 2"},
      {{0, 5}, 8, "shared_pages[1] is page 5, which no task has filled"},
      {{1, 0}, 8, "shared_pages[0] is page 1, which no task has filled as its page 0"},
      {{0, 0}, 8, "shared_pages[1] is page 0, which no task has filled as its page 1"},
  };
  for (const auto& c : cases) {
    expect_contains(
        message_of<std::invalid_argument>([&] { pool.add_task(2, c.pages, c.num_tokens); }),
        c.found);
    EXPECT_FALSE(pool.has_task(2));
    EXPECT_EQ(pool.ref_count(0), 1);
  }
  pool.check_integrity();
}

// ---- copy on write
// --------------------------------------------------------------------------------

TEST(PagePoolCopies, WritingASharedPartialPageGetsACopy) {
  PagePool pool(6, 4);
  pool.add_task(1);
  grow(pool, 1, 6);
  pool.fork(1, 2);
  ASSERT_TRUE(pool.try_reserve(2, 1));
  EXPECT_EQ(pages_of(pool, 2), (Pages{0, 2}));
  EXPECT_EQ(pages_of(pool, 1), (Pages{0, 1}));
  EXPECT_EQ(pool.ref_count(1), 1);
  EXPECT_EQ(pool.num_pending_copies(), 1);
  // The other task is alone now and writes in place.
  ASSERT_TRUE(pool.try_reserve(1, 1));
  EXPECT_EQ(pages_of(pool, 1), (Pages{0, 1}));
  EXPECT_EQ(pool.take_page_copies(),
            (std::vector<PageCopy>{{.src = 1, .dst = 2, .num_tokens = 2}}));
  EXPECT_EQ(pool.num_pending_copies(), 0);
  EXPECT_TRUE(pool.take_page_copies().empty());
  pool.check_integrity();
}

TEST(PagePoolCopies, FullSharedPagesAreNotCopied) {
  PagePool pool(6, 4);
  pool.add_task(1);
  grow(pool, 1, 8);
  pool.fork(1, 2);
  ASSERT_TRUE(pool.try_reserve(2, 1));
  EXPECT_EQ(pool.num_pending_copies(), 0);
  EXPECT_EQ(pages_of(pool, 2), (Pages{0, 1, 2}));
}

TEST(PagePoolCopies, TruncatingIntoASharedPageCopiesWhatIsLeft) {
  PagePool pool(6, 4);
  pool.add_task(1);
  grow(pool, 1, 8);
  pool.fork(1, 2);
  pool.truncate(2, 7);
  ASSERT_TRUE(pool.try_reserve(2, 4));
  EXPECT_EQ(pages_of(pool, 2), (Pages{0, 2, 3}));
  EXPECT_EQ(pool.take_page_copies(),
            (std::vector<PageCopy>{{.src = 1, .dst = 2, .num_tokens = 3}}));
}

TEST(PagePoolCopies, ForkAfterReserveMakesTheNextReserveCopy) {
  PagePool pool(6, 4);
  pool.add_task(1);
  grow(pool, 1, 5);
  ASSERT_TRUE(pool.try_reserve(1, 2));
  pool.fork(1, 2);
  ASSERT_TRUE(pool.try_reserve(1, 2));
  EXPECT_EQ(pages_of(pool, 1), (Pages{0, 2}));
  EXPECT_EQ(pool.num_pending_copies(), 1);
  pool.check_integrity();
}

TEST(PagePoolCopies, ReserveCountsTheCopyAmongThePagesItNeeds) {
  PagePool pool(3, 4);
  pool.add_task(1);
  grow(pool, 1, 6);
  pool.fork(1, 2);
  EXPECT_FALSE(pool.try_reserve(2, 3));  // a copy and a further page, one is free
  EXPECT_EQ(pages_of(pool, 2), (Pages{0, 1}));
  EXPECT_EQ(pool.num_pending_copies(), 0);
  EXPECT_EQ(pool.num_free_pages(), 1);
  EXPECT_TRUE(pool.try_reserve(2, 2));
  EXPECT_EQ(pool.num_free_pages(), 0);
  pool.check_integrity();
}

TEST(PagePoolCopies, FreeingTheWriterCancelsItsCopy) {
  PagePool pool(6, 4);
  pool.add_task(1);
  grow(pool, 1, 6);
  pool.fork(1, 2);
  ASSERT_TRUE(pool.try_reserve(2, 1));
  pool.free_task(2);
  EXPECT_EQ(pool.num_pending_copies(), 0);
  EXPECT_EQ(pool.num_free_pages(), 4);
  pool.check_integrity();
}

TEST(PagePoolCopies, TruncatingTheWriterBelowThePageCancelsItsCopy) {
  PagePool pool(6, 4);
  pool.add_task(1);
  grow(pool, 1, 6);
  pool.fork(1, 2);
  ASSERT_TRUE(pool.try_reserve(2, 1));
  pool.truncate(2, 4);
  EXPECT_EQ(pool.num_pending_copies(), 0);
  pool.check_integrity();
}

TEST(PagePoolCopies, PageThatACopyReadsIsParkedUntilTheCopyIsTaken) {
  PagePool pool(3, 4);
  pool.add_task(1);
  grow(pool, 1, 2);
  pool.fork(1, 2);
  ASSERT_TRUE(pool.try_reserve(2, 1));  // page 0 -> page 1
  pool.free_task(1);
  EXPECT_EQ(pool.ref_count(0), 0);
  EXPECT_EQ(pool.num_parked_pages(), 1);
  EXPECT_EQ(pool.num_free_pages(), 1);
  pool.check_integrity();
  pool.add_task(3);
  EXPECT_FALSE(pool.try_reserve(3, 8)) << "page 0 must not be handed out";
  ASSERT_TRUE(pool.try_reserve(3, 4));
  EXPECT_EQ(pages_of(pool, 3), Pages{2});
  EXPECT_EQ(pool.take_page_copies(),
            (std::vector<PageCopy>{{.src = 0, .dst = 1, .num_tokens = 2}}));
  EXPECT_EQ(pool.num_parked_pages(), 0);
  EXPECT_TRUE(pool.try_reserve(3, 8));
  EXPECT_EQ(pages_of(pool, 3), (Pages{2, 0}));
  pool.check_integrity();
}

TEST(PagePoolCopies, CancellingTheLastReaderFreesAParkedPage) {
  PagePool pool(4, 4);
  pool.add_task(1);
  grow(pool, 1, 2);
  pool.fork(1, 2);
  pool.fork(1, 3);
  ASSERT_TRUE(pool.try_reserve(2, 1));  // 0 -> 1
  ASSERT_TRUE(pool.try_reserve(3, 1));  // 0 -> 2
  pool.free_task(1);
  EXPECT_EQ(pool.num_parked_pages(), 1);
  pool.free_task(2);
  EXPECT_EQ(pool.num_parked_pages(), 1) << "the second copy still reads page 0";
  pool.check_integrity();
  pool.free_task(3);
  EXPECT_EQ(pool.num_parked_pages(), 0);
  EXPECT_EQ(pool.num_pending_copies(), 0);
  EXPECT_EQ(pool.num_free_pages(), 4);
  pool.check_integrity();
}

// Page 1 is written by the first copy and read by the second. Freeing its only task must keep both,
// and freeing the last reader must take the whole chain down.
TEST(PagePoolCopies, ChainsOfCopiesStandAndFallTogether) {
  for (bool take : {true, false}) {
    PagePool pool(5, 4);
    pool.add_task(1);
    grow(pool, 1, 3);
    pool.fork(1, 2);
    ASSERT_TRUE(pool.try_reserve(2, 1));  // 0 -> 1
    pool.fork(2, 3);
    ASSERT_TRUE(pool.try_reserve(3, 1));  // 1 -> 2
    pool.free_task(1);
    pool.free_task(2);
    pool.check_integrity();
    EXPECT_EQ(pool.num_parked_pages(), 2);
    EXPECT_EQ(pool.num_pending_copies(), 2);
    if (take) {
      EXPECT_EQ(pool.take_page_copies(),
                (std::vector<PageCopy>{{.src = 0, .dst = 1, .num_tokens = 3},
                                       {.src = 1, .dst = 2, .num_tokens = 3}}));
      EXPECT_EQ(pool.num_free_pages(), 4);
    } else {
      pool.free_task(3);
      EXPECT_EQ(pool.num_pending_copies(), 0);
      EXPECT_EQ(pool.num_free_pages(), 5);
    }
    EXPECT_EQ(pool.num_parked_pages(), 0);
    pool.check_integrity();
  }
}

// ---- bad arguments
// --------------------------------------------------------------------------------

TEST(PagePoolErrors, RefusesNonsenseSizes) {
  const auto text = [](int64_t pages, int64_t size, int64_t tokens) {
    return message_of<std::invalid_argument>([&] { PagePool(pages, size, tokens); });
  };
  expect_contains(text(0, 16, 0), "page_pool: num_pages is 0; expected 1 to 2147483647");
  expect_contains(text(-3, 16, 0), "num_pages is -3");
  expect_contains(text(int64_t{1} << 31, 16, 0), "num_pages is 2147483648");
  expect_contains(text(4, 0, 0), "page_pool: page_size is 0; expected 1 to 2147483647");
  expect_contains(text(4, -16, 0), "page_size is -16");
  expect_contains(text(4, 16, -1), "max_task_tokens is -1; expected 0 or more");
}

TEST(PagePoolErrors, UnknownAndTakenIdsAreNamed) {
  PagePool pool(4, 4);
  pool.add_task(1);
  grow(pool, 1, 5);
  const std::function<void()> unknown[] = {
      [&] { pool.fork(9, 2); },     [&] { (void)pool.try_reserve(9, 1); },
      [&] { pool.append(9, 0); },   [&] { pool.truncate(9, 0); },
      [&] { pool.free_task(9); },   [&] { (void)pool.length(9); },
      [&] { (void)pool.pages(9); },
  };
  for (const auto& call : unknown) {
    expect_contains(message_of<std::invalid_argument>(call), "task_id 9 is unknown");
  }
  const std::function<void()> taken[] = {
      [&] { pool.add_task(1); }, [&] { pool.add_task(1, Pages{0}, 4); }, [&] { pool.fork(1, 1); }};
  for (const auto& call : taken) {
    expect_contains(message_of<std::invalid_argument>(call), "task_id 1 is in use");
  }
  EXPECT_EQ(pool.num_free_pages(), 2);
  pool.check_integrity();
}

TEST(PagePoolErrors, FreeingTwiceThrowsAndFreesOnce) {
  PagePool pool(4, 4);
  pool.add_task(1);
  grow(pool, 1, 5);
  pool.free_task(1);
  expect_contains(message_of<std::invalid_argument>([&] { pool.free_task(1); }),
                  "free_task: task_id 1 is unknown; expected a task that was added");
  EXPECT_EQ(pool.num_free_pages(), 4);
  pool.check_integrity();
}

TEST(PagePoolErrors, CountsOutOfRangeAreNamed) {
  PagePool pool(4, 4);
  pool.add_task(1);
  grow(pool, 1, 5);
  expect_contains(message_of<std::invalid_argument>([&] { (void)pool.try_reserve(1, -1); }),
                  "try_reserve: num_new_tokens is -1; expected 0 or more");
  expect_contains(message_of<std::invalid_argument>([&] { pool.append(1, -1); }),
                  "append: num_new_tokens is -1");
  expect_contains(message_of<std::invalid_argument>([&] { pool.append(1, 4); }),
                  "num_new_tokens is 4 for task 1 of 5 tokens in 2 pages; expected 0 to 3");
  expect_contains(message_of<std::invalid_argument>([&] { pool.truncate(1, 6); }),
                  "truncate: num_tokens is 6; expected 0 to 5");
  expect_contains(message_of<std::invalid_argument>([&] { pool.truncate(1, -1); }),
                  "truncate: num_tokens is -1");
  expect_contains(message_of<std::invalid_argument>([&] { (void)pool.ref_count(4); }),
                  "ref_count: page is 4; expected 0 to 3");
  expect_contains(message_of<std::invalid_argument>([&] { (void)pool.ref_count(-1); }),
                  "ref_count: page is -1");
  EXPECT_EQ(pool.length(1), 5);
}

// ---- integrity
// ------------------------------------------------------------------------------------

// A pool with a shared page, a queued copy and a parked page, broken in one way each.
TEST(PagePoolIntegrity, EveryKindOfDamageIsDescribed) {
  const struct {
    const char* found;
    std::function<void(PagePool&)> damage;
  } cases[] = {
      {"page 0 has reference count 3; expected 2", [](PagePool& p) { ++Access::ref_counts(p)[0]; }},
      {"page 7 has reference count 1; expected 0", [](PagePool& p) { ++Access::ref_counts(p)[7]; }},
      {"is on the free list while 2 tasks hold it", [](PagePool& p) { Access::push_free(p, 0); }},
      {"the free list", [](PagePool& p) { Access::push_free(p, 7); }},
      {"the free list has 5 pages; expected 6", [](PagePool& p) { ++Access::num_free(p); }},
      {"the free list is broken", [](PagePool& p) { Access::prev_free(p)[7] = 2; }},
      {"neither held nor free nor parked",
       [](PagePool& p) { Access::ref_counts(p)[Access::take_free(p)] = 0; }},
      {"neither held nor free nor parked", [](PagePool& p) { Access::parked(p).clear(); }},
      {"is parked; expected", [](PagePool& p) { Access::copies(p).clear(); }},
      {"two queued copies write page",
       [](PagePool& p) { Access::copies(p).push_back(Access::copies(p).front()); }},
      {"is free while a queued copy",
       [](PagePool& p) { Access::copies(p).push_back({.src = 0, .dst = 7, .num_tokens = 1}); }},
      {"task 1 has 13 tokens in 3 pages of 4", [](PagePool& p) { Access::length(p, 1) = 13; }},
      {"holds page 99; expected 0 to 9", [](PagePool& p) { Access::list(p, 1)[1] = 99; }},
      {"past its length, but 2 lists hold it",
       [](PagePool& p) { Access::length(p, 1) = Access::length(p, 2) = 4; }},
      {"expected the same place in every list",
       [](PagePool& p) { std::swap(Access::list(p, 2)[0], Access::list(p, 2)[1]); }},
  };
  for (const auto& c : cases) {
    PagePool pool(10, 4);
    pool.add_task(1);
    grow(pool, 1, 9);  // pages 0 1 2
    pool.fork(1, 2);
    pool.add_task(3);
    grow(pool, 3, 1);  // page 3
    pool.fork(3, 4);
    ASSERT_TRUE(pool.try_reserve(4, 1));  // page 3 -> page 4
    pool.free_task(3);                    // parks page 3
    pool.check_integrity();
    c.damage(pool);
    const std::string text = message_of<std::runtime_error>([&] { pool.check_integrity(); });
    expect_contains(text, c.found);
  }
}

// ---- aborts
// ---------------------------------------------------------------------------------------

// A request of five pages, two of them a shared prefix, is filled in three chunks and given up at
// every point, sometimes twice; unknown ids are freed in between.
TEST(PagePool, AbortsAtAnyMomentLeaveNothingBehind) {
  constexpr uint32_t kSeed = 91;
  SCOPED_TRACE(concat("seed ", kSeed));
  std::mt19937 random(kSeed);
  PagePool pool(12, 4);
  pool.add_task(0);
  grow(pool, 0, 8);
  const Pages prefix = pages_of(pool, 0);
  for (int round = 0; round < 1000; ++round) {
    const int64_t id = round + 1;
    pool.add_task(id, prefix, 8);
    const int64_t chunks[] = {4, 4, 3};
    const size_t abort_after = random() % 5;  // 4: runs to its end; also between reserve and append
    const bool before_append = random() % 2 == 0;
    for (size_t chunk = 0; chunk < 3; ++chunk) {
      if (chunk == abort_after && !before_append) break;
      ASSERT_TRUE(pool.try_reserve(id, chunks[chunk]));
      if (chunk == abort_after) break;
      pool.append(id, chunks[chunk]);
    }
    if (random() % 3 == 0) {
      EXPECT_THROW(pool.free_task(-id), std::invalid_argument);
    }
    pool.free_task(id);
    EXPECT_THROW(pool.free_task(id), std::invalid_argument);
    pool.check_integrity();
    ASSERT_EQ(pool.num_free_pages(), 10);
    ASSERT_EQ(pages_of(pool, 0), prefix);
  }
  pool.free_task(0);
  EXPECT_EQ(pool.num_free_pages(), 12);
  for (int64_t page = 0; page < 12; ++page) EXPECT_EQ(pool.ref_count(page), 0);
  pool.check_integrity();
}

// ---- prefixes
// -------------------------------------------------------------------------------------

using Tokens = std::vector<int64_t>;

TEST(PagePoolPrefixes, WholePagesAreFoundAndTheLastTokenIsNot) {
  PagePool pool(8, 4);
  const Tokens tokens = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  pool.add_task(0);
  grow(pool, 0, 9);
  EXPECT_EQ(pool.match_prefix(tokens).num_tokens, 0);
  pool.index_prefix(0, tokens);
  EXPECT_EQ(pool.num_indexed_pages(), 2);
  EXPECT_EQ(pool.match_prefix(tokens).num_tokens, 8);
  EXPECT_EQ(pool.match_prefix(std::span(tokens).first(8)).num_tokens, 4);
  EXPECT_EQ(pool.match_prefix(std::span(tokens).first(4)).num_tokens, 0);
  EXPECT_EQ(pool.match_prefix({}).num_tokens, 0);
  const Tokens other = {1, 2, 3, 4, 5, 6, 7, 0, 9};
  EXPECT_EQ(pool.match_prefix(other).num_tokens, 4);
  EXPECT_EQ(pool.match_prefix(tokens, "tenant").num_tokens, 0);
  pool.check_integrity();
}

TEST(PagePoolPrefixes, WhatFollowsAnIndexedPageIsAddedAlone) {
  PagePool pool(8, 2);
  const Tokens tokens = {1, 2, 3, 4, 5, 6, 7};
  const auto from = [&](size_t first) { return std::span(tokens).subspan(first); };
  pool.add_task(0);
  grow(pool, 0, 4);
  EXPECT_FALSE(pool.extend_indexed(0, 2, from(2)));  // the page before is unknown
  EXPECT_EQ(pool.num_indexed_pages(), 0);
  pool.index_prefix(0, tokens, "salt");
  grow(pool, 0, 3);
  EXPECT_TRUE(pool.extend_indexed(0, 4, from(4)));
  EXPECT_TRUE(pool.extend_indexed(0, 4, from(4)));  // again: nothing new
  EXPECT_TRUE(pool.extend_indexed(0, 6, from(6)));  // no full page follows
  EXPECT_EQ(pool.num_indexed_pages(), 3);
  EXPECT_EQ(pool.match_prefix(tokens, "salt").num_tokens, 6);
  EXPECT_EQ(pool.match_prefix(tokens).num_tokens, 0);

  // A second task with the same tokens in pages of its own: they are not in the index.
  pool.add_task(1);
  grow(pool, 1, 4);
  pool.index_prefix(1, tokens, "salt");
  EXPECT_FALSE(pool.extend_indexed(1, 2, from(2)));

  const Tokens other = {5, 9};
  EXPECT_THROW((void)pool.extend_indexed(0, 4, other), std::invalid_argument);
  expect_error<std::invalid_argument>(
      "extend_indexed: first_token is 3; expected a multiple of 2 from 2 to 7, the length of task "
      "0",
      [&] { (void)pool.extend_indexed(0, 3, from(3)); });
  expect_error<std::invalid_argument>(
      "extend_indexed: first_token is 0; expected a multiple of 2 from 2 to 7, the length of task "
      "0",
      [&] { (void)pool.extend_indexed(0, 0, from(0)); });
  expect_error<std::invalid_argument>(
      "extend_indexed: tokens has 3 entries; expected at least 4, to the end of the last full page "
      "of task 0",
      [&] { (void)pool.extend_indexed(0, 2, from(4)); });
  EXPECT_EQ(pool.num_indexed_pages(), 3);
  pool.check_integrity();
}

TEST(PagePoolPrefixes, AdoptedPagesAreSharedWhileHeldAndTakenFromTheFreeOnesElse) {
  PagePool pool(4, 2);
  const Tokens tokens = {1, 2, 3, 4, 5};
  pool.add_task(0);
  grow(pool, 0, 4);
  pool.index_prefix(0, tokens);
  const Pages pages = pages_of(pool, 0);
  EXPECT_EQ(pool.match_prefix(tokens).num_unheld_pages, 0);
  EXPECT_EQ(pool.adopt_prefix(1, tokens), 4);
  EXPECT_EQ(pages_of(pool, 1), pages);
  EXPECT_EQ(pool.ref_count(pages[0]), 2);
  pool.free_task(0);
  pool.free_task(1);
  EXPECT_EQ(pool.num_free_pages(), 4);
  EXPECT_EQ(pool.match_prefix(tokens).num_unheld_pages, 2);
  EXPECT_EQ(pool.adopt_prefix(2, tokens), 4);
  EXPECT_EQ(pages_of(pool, 2), pages);
  EXPECT_EQ(pool.num_free_pages(), 2);
  pool.check_integrity();
}

TEST(PagePoolPrefixes, APageLeavesTheIndexWhenItsMemoryIsNeededAndDeepOnesGoFirst) {
  PagePool pool(3, 2);
  const Tokens tokens = {1, 2, 3, 4, 5};
  pool.add_task(0);
  grow(pool, 0, 4);
  pool.index_prefix(0, tokens);
  pool.free_task(0);  // free order: the page never used, then the second, then the first
  pool.add_task(1);
  grow(pool, 1, 4);
  EXPECT_EQ(pool.match_prefix(tokens).num_tokens, 2);
  pool.add_task(2);
  grow(pool, 2, 2);
  EXPECT_EQ(pool.match_prefix(tokens).num_tokens, 0);
  EXPECT_EQ(pool.num_indexed_pages(), 0);
  pool.check_integrity();
}

TEST(PagePoolPrefixes, APageThatIsWrittenAgainIsForgotten) {
  PagePool pool(4, 4);
  const Tokens tokens = {1, 2, 3, 4, 5};
  pool.add_task(0);
  grow(pool, 0, 4);
  pool.index_prefix(0, tokens);
  pool.truncate(0, 3);
  EXPECT_EQ(pool.match_prefix(tokens).num_tokens, 4);  // nothing has been written yet
  ASSERT_TRUE(pool.try_reserve(0, 1));
  EXPECT_EQ(pool.match_prefix(tokens).num_tokens, 0);
  pool.check_integrity();
}

TEST(PagePoolPrefixes, APageThatIsCopiedBeforeItIsWrittenStays) {
  PagePool pool(4, 4);
  const Tokens tokens = {1, 2, 3, 4, 5};
  pool.add_task(0);
  grow(pool, 0, 4);
  pool.index_prefix(0, tokens);
  pool.fork(0, 1);
  pool.truncate(1, 3);
  ASSERT_TRUE(pool.try_reserve(1, 1));
  pool.free_task(0);  // parked: the copy still reads it
  EXPECT_EQ(pool.num_parked_pages(), 1);
  EXPECT_EQ(pool.adopt_prefix(2, tokens), 4);
  EXPECT_EQ(pool.num_parked_pages(), 0);
  EXPECT_EQ(pool.take_page_copies().size(), 1u);
  pool.check_integrity();
  pool.free_task(1);
  pool.free_task(2);
  EXPECT_EQ(pool.num_free_pages(), 4);
  pool.check_integrity();
}

TEST(PagePoolPrefixes, TheFirstOfTwoEqualPagesStaysAndSaltsAreApart) {
  PagePool pool(8, 2);
  const Tokens tokens = {1, 2, 3, 4, 5};
  for (int64_t id = 0; id < 2; ++id) {
    pool.add_task(id);
    grow(pool, id, 4);
    pool.index_prefix(id, tokens);
  }
  EXPECT_EQ(pool.num_indexed_pages(), 2);
  pool.add_task(2);
  grow(pool, 2, 4);
  pool.index_prefix(2, tokens, "tenant");
  EXPECT_EQ(pool.num_indexed_pages(), 4);
  EXPECT_EQ(pool.adopt_prefix(3, tokens, "tenant"), 4);
  EXPECT_EQ(pages_of(pool, 3), pages_of(pool, 2));
  pool.clear_prefixes();
  EXPECT_EQ(pool.num_indexed_pages(), 0);
  EXPECT_EQ(pool.match_prefix(tokens).num_tokens, 0);
  pool.check_integrity();
}

TEST(PagePoolPrefixes, WrongTokensAreRefused) {
  PagePool pool(4, 2);
  pool.add_task(0);
  grow(pool, 0, 4);
  const Tokens tokens = {1, 2, 3, 4};
  expect_contains(
      message_of<std::invalid_argument>([&] { pool.index_prefix(0, std::span(tokens).first(3)); }),
      "tokens has 3 entries; expected at least 4");
  pool.index_prefix(0, tokens);
  const Tokens others = {9, 2, 3, 4};
  expect_contains(message_of<std::invalid_argument>([&] { pool.index_prefix(0, others); }),
                  "indexed with other tokens");
  expect_contains(message_of<std::invalid_argument>([&] { pool.index_prefix(0, tokens, "x"); }),
                  "under another salt");
  expect_contains(message_of<std::invalid_argument>([&] { pool.index_prefix(7, tokens); }),
                  "task_id 7");
  expect_contains(message_of<std::invalid_argument>([&] { pool.adopt_prefix(0, tokens); }),
                  "task_id 0 is in use");
  pool.check_integrity();
}

}  // namespace
}  // namespace astrai::runtime
