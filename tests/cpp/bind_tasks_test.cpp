#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <new>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/counters.h"
#include "runtime/page_pool.h"
#include "runtime_test_support.h"

namespace {
std::atomic<int64_t> heap_allocations{0};
}  // namespace

// The counters say what the runtime admits to; this sees every allocation there is. Not inlined, or
// the compiler sees a free() without its malloc().
[[gnu::noinline]] void* operator new(size_t bytes) {
  heap_allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}

namespace astrai::runtime {
namespace {

using Ids = std::vector<int64_t>;

void grow(PagePool& pool, int64_t task_id, int64_t num_tokens) {
  ASSERT_TRUE(pool.try_reserve(task_id, num_tokens));
  pool.append(task_id, num_tokens);
}

template <class T>
std::vector<T> values(const InferenceWorkspace& workspace, const char* name, int64_t size) {
  const T* data = workspace.host_slice(name).ptr<T>();
  return {data, data + size};
}

// Each array of a step, recomputed from the definition, one token at a time.
struct ExpectedStep {
  std::vector<int32_t> qo_indptr{0}, kv_indptr{0}, kv_lens, kv_indices;
  std::vector<int64_t> last_rows, positions, slot_mapping;

  ExpectedStep(const PagePool& pool, const Ids& task_ids, const Ids& q_lens, int64_t num_rows) {
    const int64_t page_size = pool.page_size();
    for (size_t i = 0; i < task_ids.size(); ++i) {
      const std::span<const int32_t> pages = pool.pages(task_ids[i]);
      const int64_t length = pool.length(task_ids[i]);
      const int64_t kv_len = length + q_lens[i];
      kv_lens.push_back(static_cast<int32_t>(kv_len));
      for (int64_t index = 0; index * page_size < kv_len; ++index) {
        kv_indices.push_back(pages[static_cast<size_t>(index)]);
      }
      for (int64_t position = length; position < kv_len; ++position) {
        positions.push_back(position);
        slot_mapping.push_back(pages[static_cast<size_t>(position / page_size)] * page_size +
                               position % page_size);
      }
      finish_row();
    }
    while (static_cast<int64_t>(kv_lens.size()) < num_rows) {
      kv_lens.push_back(0);
      positions.push_back(0);
      slot_mapping.push_back(-1);
      finish_row();
    }
  }

  void finish_row() {
    qo_indptr.push_back(static_cast<int32_t>(positions.size()));
    kv_indptr.push_back(static_cast<int32_t>(kv_indices.size()));
    last_rows.push_back(static_cast<int64_t>(positions.size()) - 1);
  }
};

void expect_bound(const InferenceWorkspace& workspace, const StepMetadata& step,
                  const ExpectedStep& expected) {
  EXPECT_EQ(values<int32_t>(workspace, "qo_indptr", step.num_rows + 1), expected.qo_indptr);
  EXPECT_EQ(values<int32_t>(workspace, "kv_indptr", step.num_rows + 1), expected.kv_indptr);
  EXPECT_EQ(values<int32_t>(workspace, "kv_lens", step.num_rows), expected.kv_lens);
  EXPECT_EQ(values<int64_t>(workspace, "last_rows", step.num_rows), expected.last_rows);
  EXPECT_EQ(values<int64_t>(workspace, "positions", step.num_row_tokens), expected.positions);
  EXPECT_EQ(values<int64_t>(workspace, "slot_mapping", step.num_row_tokens), expected.slot_mapping);
  EXPECT_EQ(values<int32_t>(workspace, "kv_indices", step.num_pages_used), expected.kv_indices);
}

TEST(BindTasks, DecodeStepWorkedOutByHand) {
  TestWorkspace test(small_shape(4));
  PagePool pool(8, 4);
  for (int64_t id : {10, 20, 30}) pool.add_task(id);
  grow(pool, 10, 5);  // pages 0 1
  grow(pool, 20, 4);  // page 2
  for (int64_t id : {10, 20, 30}) ASSERT_TRUE(pool.try_reserve(id, 1));
  const StepMetadata step = pool.bind_tasks(test.workspace, Ids{30, 10, 20}, Ids{1, 1, 1});
  using I32 = std::vector<int32_t>;
  using I64 = std::vector<int64_t>;
  EXPECT_EQ(values<int32_t>(test.workspace, "qo_indptr", 4), (I32{0, 1, 2, 3}));
  EXPECT_EQ(values<int32_t>(test.workspace, "kv_indptr", 4), (I32{0, 1, 3, 5}));
  EXPECT_EQ(values<int32_t>(test.workspace, "kv_lens", 3), (I32{1, 6, 5}));
  EXPECT_EQ(values<int64_t>(test.workspace, "last_rows", 3), (I64{0, 1, 2}));
  EXPECT_EQ(values<int64_t>(test.workspace, "positions", 3), (I64{0, 5, 4}));
  EXPECT_EQ(values<int64_t>(test.workspace, "slot_mapping", 3), (I64{16, 5, 12}));
  EXPECT_EQ(values<int32_t>(test.workspace, "kv_indices", 5), (I32{4, 0, 1, 2, 3}));
  EXPECT_EQ(step.num_tasks, 3);
  EXPECT_EQ(step.num_tokens, 3);
  EXPECT_EQ(step.num_rows, 3);
  EXPECT_EQ(step.num_row_tokens, 3);
  EXPECT_EQ(step.max_q_len, 1);
  EXPECT_EQ(step.max_kv_len, 6);
  EXPECT_EQ(step.num_pages_used, 5);
  EXPECT_TRUE(step.is_decode);
  EXPECT_EQ(step.metadata_bytes, test.workspace.step_arrays().kv_indices_offset + 5 * 4);
}

TEST(BindTasks, MixedStepIsNoDecode) {
  TestWorkspace test(small_shape(4));
  PagePool pool(8, 4);
  pool.add_task(1);
  pool.add_task(2);
  grow(pool, 1, 3);
  ASSERT_TRUE(pool.try_reserve(1, 1));
  ASSERT_TRUE(pool.try_reserve(2, 7));
  const StepMetadata step = pool.bind_tasks(test.workspace, Ids{1, 2}, Ids{1, 7});
  EXPECT_FALSE(step.is_decode);
  EXPECT_EQ(step.max_q_len, 7);
  EXPECT_EQ(step.max_kv_len, 7);
  EXPECT_EQ(step.num_tokens, 8);
  EXPECT_EQ(pool.length(2), 0) << "bind_tasks changes nothing in the pool";
}

// Random pools of tasks, forked and cut, in random steps. The slab is filled with a pattern first:
// what bind_tasks has no business with must keep it.
TEST(BindTasks, AgreesWithRecomputationAndTouchesNothingElse) {
  for (int64_t page_size : {1, 3, 16}) {
    for (uint32_t seed = 1; seed <= 40; ++seed) {
      SCOPED_TRACE(concat("page_size ", page_size, ", seed ", seed));
      std::mt19937 random(seed);
      const auto pick = [&](int64_t low, int64_t high) {
        return std::uniform_int_distribution<int64_t>(low, high)(random);
      };
      TestWorkspace test(small_shape(page_size));
      PagePool pool(600, page_size);
      Ids task_ids;
      Ids q_lens;
      const int64_t num_tasks = pick(1, 5);
      for (int64_t id = 0; id < num_tasks; ++id) {
        if (id > 0 && pick(0, 2) == 0) {
          pool.fork(pick(0, id - 1), id);
          if (pick(0, 1)) pool.truncate(id, pick(0, pool.length(id)));
        } else {
          pool.add_task(id);
          grow(pool, id, pick(0, 80));
        }
      }
      for (int64_t id = num_tasks - 1; id >= 0; --id) {
        task_ids.push_back(id);
        q_lens.push_back(seed % 3 == 0 ? 1 : pick(1, 12));
        ASSERT_TRUE(pool.try_reserve(id, q_lens.back() + pick(0, 4)));
      }
      pool.take_page_copies();
      const int64_t pad_to = seed % 2 ? pick(num_tasks, 5) : 0;

      test.buffer.fill(0xa7);
      const StepMetadata step = pool.bind_tasks(test.workspace, task_ids, q_lens, pad_to);
      const ExpectedStep expected(pool, task_ids, q_lens, step.num_rows);
      EXPECT_EQ(step.num_rows, std::max(num_tasks, pad_to));
      expect_bound(test.workspace, step, expected);
      EXPECT_EQ(step.num_row_tokens - step.num_tokens, step.num_rows - num_tasks);
      EXPECT_EQ(step.num_pages_used, static_cast<int64_t>(expected.kv_indices.size()));
      EXPECT_EQ(step.is_decode, std::all_of(q_lens.begin(), q_lens.end(),
                                            [](int64_t q_len) { return q_len == 1; }));

      std::vector<bool> used(static_cast<size_t>(test.buffer.bytes()), false);
      const auto use = [&](const char* name, int64_t size) {
        const WorkspaceSlice& slice = test.workspace.layout().find(name);
        for (int64_t i = 0; i < size * dtype_bytes(slice.dtype); ++i) {
          used[static_cast<size_t>(slice.offset + i)] = true;
        }
      };
      for (const char* name : {"qo_indptr", "kv_indptr"}) use(name, step.num_rows + 1);
      for (const char* name : {"kv_lens", "last_rows"}) use(name, step.num_rows);
      for (const char* name : {"positions", "slot_mapping"}) use(name, step.num_row_tokens);
      use("kv_indices", step.num_pages_used);
      const ByteRange range = test.workspace.layout().step_metadata;
      const std::vector<uint8_t> bytes = test.buffer.contents();
      for (size_t i = 0; i < bytes.size(); ++i) {
        if (used[i]) {
          ASSERT_GE(static_cast<int64_t>(i), range.offset);
          ASSERT_LT(static_cast<int64_t>(i), range.offset + step.metadata_bytes);
        } else {
          ASSERT_EQ(bytes[i], 0xa7) << "byte " << i;
        }
      }
      EXPECT_TRUE(test.buffer.guards_intact());
    }
  }
}

TEST(BindTasks, FillsEveryArrayToItsLastEntry) {
  const WorkspaceShape shape = small_shape(3);  // 5 tasks of 34 pages
  TestWorkspace test(shape);
  PagePool pool(170, 3);
  Ids task_ids{1, 2, 3, 4, 5};
  for (int64_t id : task_ids) {
    pool.add_task(id);
    grow(pool, id, id == 1 ? 40 : 99);
  }
  const Ids q_lens{60, 1, 1, 1, 1};  // 64 rows; every task ends at 100 tokens
  for (size_t i = 0; i < 5; ++i) ASSERT_TRUE(pool.try_reserve(task_ids[i], q_lens[i]));
  EXPECT_EQ(pool.num_free_pages(), 0);
  const StepMetadata step = pool.bind_tasks(test.workspace, task_ids, q_lens);
  EXPECT_EQ(step.num_row_tokens, shape.max_step_tokens);
  EXPECT_EQ(step.num_pages_used, 170);
  EXPECT_EQ(step.metadata_bytes, test.workspace.layout().step_metadata.bytes);
  expect_bound(test.workspace, step, ExpectedStep(pool, task_ids, q_lens, 5));
  EXPECT_TRUE(test.buffer.guards_intact());
}

TEST(BindTasks, PaddingRowsSeeNothingAndWriteNowhere) {
  TestWorkspace test(small_shape(4));
  PagePool pool(8, 4);
  pool.add_task(1);
  ASSERT_TRUE(pool.try_reserve(1, 1));
  const StepMetadata step = pool.bind_tasks(test.workspace, Ids{1}, Ids{1}, 4);
  EXPECT_EQ(step.num_tasks, 1);
  EXPECT_EQ(step.num_tokens, 1);
  EXPECT_EQ(step.num_rows, 4);
  EXPECT_EQ(step.num_row_tokens, 4);
  EXPECT_EQ(values<int32_t>(test.workspace, "kv_lens", 4), (std::vector<int32_t>{1, 0, 0, 0}));
  EXPECT_EQ(values<int64_t>(test.workspace, "slot_mapping", 4),
            (std::vector<int64_t>{0, -1, -1, -1}));
  EXPECT_EQ(values<int32_t>(test.workspace, "qo_indptr", 5), (std::vector<int32_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(values<int32_t>(test.workspace, "kv_indptr", 5), (std::vector<int32_t>{0, 1, 1, 1, 1}));
  EXPECT_TRUE(step.is_decode);

  const StepMetadata empty = pool.bind_tasks(test.workspace, Ids{}, Ids{}, 2);
  EXPECT_EQ(empty.num_tasks, 0);
  EXPECT_EQ(empty.num_rows, 2);
  EXPECT_EQ(empty.num_pages_used, 0);
  EXPECT_EQ(empty.max_q_len, 1);
  EXPECT_EQ(empty.max_kv_len, 0);
  EXPECT_EQ(values<int64_t>(test.workspace, "slot_mapping", 2), (std::vector<int64_t>{-1, -1}));
}

TEST(BindTasks, WritesTheHostMirrorAndLeavesTheSlabAlone) {
  const WorkspaceShape shape = small_shape(4);
  const WorkspaceLayout plan = plan_workspace(shape);
  GuardedBuffer slab(plan.total_bytes);
  GuardedBuffer mirror(plan.host_inputs.bytes);
  slab.fill(0x11);
  const InferenceWorkspace workspace(
      shape, slab.view(Device{.type = DeviceType::kCuda, .index = 0}), mirror.view());
  PagePool pool(8, 4);
  pool.add_task(1);
  ASSERT_TRUE(pool.try_reserve(1, 6));
  const StepMetadata step = pool.bind_tasks(workspace, Ids{1}, Ids{6});
  expect_bound(workspace, step, ExpectedStep(pool, Ids{1}, Ids{6}, 1));
  EXPECT_EQ(slab.contents(), std::vector<uint8_t>(static_cast<size_t>(plan.total_bytes), 0x11));
  EXPECT_TRUE(mirror.guards_intact());
}

// ---- errors
// ---------------------------------------------------------------------------------------

class BindTasksErrors : public ::testing::Test {
 protected:
  BindTasksErrors() : test_(small_shape(4)), pool_(60, 4) {
    for (int64_t id = 1; id <= 6; ++id) {
      pool_.add_task(id);
      EXPECT_TRUE(pool_.try_reserve(id, 4));
    }
    test_.buffer.fill(0x5a);
  }

  // Expects E with the text, and a slab without a changed byte.
  template <class E = std::invalid_argument>
  void expect_refused(const Ids& task_ids, const Ids& q_lens, int64_t pad_to,
                      const std::string& text) {
    expect_contains(
        message_of<E>([&] { (void)pool_.bind_tasks(test_.workspace, task_ids, q_lens, pad_to); }),
        "bind_tasks: " + text);
    EXPECT_EQ(test_.buffer.contents(),
              std::vector<uint8_t>(static_cast<size_t>(test_.buffer.bytes()), 0x5a));
    pool_.check_integrity();
  }

  TestWorkspace test_;
  PagePool pool_;
};

TEST_F(BindTasksErrors, ListsThatDoNotFitTogether) {
  expect_refused({1, 2}, {1}, 0, "q_lens has 1 entries; expected 2");
  expect_refused({}, {}, 0, "task_ids is empty");
  expect_refused({1, 99}, {1, 1}, 0, "task_id 99 is unknown");
  expect_refused({1, 2, 1}, {1, 1, 1}, 0, "task 1 is in task_ids twice");
  expect_refused({1, 2}, {1, 0}, 0, "q_lens[1] is 0; expected at least 1");
  expect_refused({1}, {-5}, 0, "q_lens[0] is -5; expected at least 1");
}

TEST_F(BindTasksErrors, StepsBeyondTheWorkspace) {
  expect_refused({1, 2, 3, 4, 5, 6}, {1, 1, 1, 1, 1, 1}, 0,
                 "the step has 6 tasks with padding; expected at most 5 (max_batch)");
  expect_refused({1}, {1}, 6, "the step has 6 tasks with padding; expected at most 5");
  expect_refused({1, 2}, {1, 1}, 1, "pad_to is 1; expected 0 or at least 2");
  expect_refused({1}, {1}, -1, "pad_to is -1; expected 0 or at least 1");
  expect_refused({1}, {int64_t{1} << 62}, 0, "the step has more than 64 tokens");
  ASSERT_TRUE(pool_.try_reserve(1, 40));
  ASSERT_TRUE(pool_.try_reserve(2, 40));
  expect_refused({1, 2}, {40, 25}, 0,
                 "the step has more than 64 tokens: q_lens[1] is 25 after 40 tokens");
  expect_refused({1, 2}, {40, 23}, 5, "the step has more than 64 tokens");
  EXPECT_EQ(pool_.bind_tasks(test_.workspace, Ids{1, 2}, Ids{40, 24}).num_tokens, 64);
}

TEST_F(BindTasksErrors, TaskBeyondTheContext) {
  grow(pool_, 1, 100);
  ASSERT_TRUE(pool_.try_reserve(1, 1));
  expect_refused({2, 1}, {1, 1}, 0, "task 1 would have 101 tokens; expected at most 100");
}

TEST_F(BindTasksErrors, TokensWithoutPages) {
  expect_refused({1, 2}, {4, 5}, 0,
                 "task 2 holds 1 pages of 4 tokens for 5 tokens; expected 2 pages");
}

TEST_F(BindTasksErrors, OtherPageSize) {
  PagePool other(8, 5);
  other.add_task(1);
  ASSERT_TRUE(other.try_reserve(1, 1));
  expect_contains(message_of<std::invalid_argument>(
                      [&] { (void)other.bind_tasks(test_.workspace, Ids{1}, Ids{1}); }),
                  "bind_tasks: workspace has page_size 4; expected 5");
}

TEST_F(BindTasksErrors, WritingASharedPage) {
  pool_.append(1, 2);
  pool_.fork(1, 7);
  expect_refused<std::runtime_error>({1}, {1}, 0, "task 1 would write page 0, which 2 tasks hold");
  ASSERT_TRUE(pool_.try_reserve(1, 1));
  pool_.take_page_copies();
  EXPECT_EQ(pool_.bind_tasks(test_.workspace, Ids{1, 7}, Ids{1, 1}).num_tasks, 2);
}

TEST_F(BindTasksErrors, CopiesThatNobodyTook) {
  pool_.append(1, 2);
  pool_.fork(1, 7);
  ASSERT_TRUE(pool_.try_reserve(7, 1));
  expect_refused<std::runtime_error>({2}, {1}, 0, "1 page copies are queued; expected");
  pool_.take_page_copies();
  EXPECT_EQ(pool_.bind_tasks(test_.workspace, Ids{7}, Ids{1}).num_tasks, 1);
}

// A refused step must not make the next one think that it saw its tasks already.
TEST_F(BindTasksErrors, RefusalLeavesNoTrace) {
  expect_refused({1, 99}, {1, 1}, 0, "task_id 99 is unknown");
  EXPECT_EQ(pool_.bind_tasks(test_.workspace, Ids{1, 2}, Ids{1, 1}).num_tasks, 2);
  EXPECT_EQ(pool_.bind_tasks(test_.workspace, Ids{1, 2}, Ids{1, 1}).num_tasks, 2);
}

// ---- steady state
// ---------------------------------------------------------------------------------

TEST(BindTasks, SteadyDecodeNeverAllocates) {
  constexpr int64_t kContext = 900;
  WorkspaceShape shape = small_shape(16);
  shape.max_batch = 8;
  shape.max_context = kContext;
  TestWorkspace test(shape);
  PagePool pool(8 * 57, 16, kContext);
  Ids task_ids;
  for (int64_t id = 0; id < 8; ++id) {
    pool.add_task(id);
    grow(pool, id, 20 + id);
    task_ids.push_back(id);
  }
  const Ids q_lens(8, 1);
  const auto step = [&] {
    bool reserved = true;
    for (int64_t id : task_ids) reserved = pool.try_reserve(id, 1) && reserved;
    (void)pool.bind_tasks(test.workspace, task_ids, q_lens);
    for (int64_t id : task_ids) pool.append(id, 1);
    return reserved;
  };
  ASSERT_TRUE(step());  // the first one makes room for max_batch tasks
  const int64_t heap_before = heap_allocations.load();
  const int64_t counted_before = counters().host_allocations.load();
  bool reserved = true;
  for (int64_t i = 0; i < 850; ++i) reserved = step() && reserved;
  const int64_t heap_after = heap_allocations.load();
  EXPECT_TRUE(reserved);
  EXPECT_EQ(heap_after, heap_before);
  EXPECT_EQ(counters().host_allocations.load(), counted_before);
  EXPECT_EQ(pool.length(0), 871);
}

TEST(BindTasks, ListsThatGrowAreCounted) {
  PagePool pool(64, 1);  // no hint: the list grows
  pool.add_task(1);
  const int64_t before = counters().host_allocations.load();
  for (int i = 0; i < 64; ++i) grow(pool, 1, 1);
  const int64_t growths = counters().host_allocations.load() - before;
  EXPECT_GE(growths, 1);
  EXPECT_LE(growths, 7) << "growth is twofold";
}

TEST(BindTasks, StepsWithCopiesReuseTheirBuffers) {
  TestWorkspace test(small_shape(4));
  PagePool pool(20, 4, 100);
  pool.add_task(1);
  grow(pool, 1, 6);
  std::vector<PageCopy> copies;
  const auto round = [&](int64_t child) {
    pool.fork(1, child);
    const int64_t before = counters().host_allocations.load();
    const bool reserved = pool.try_reserve(child, 1);
    pool.take_page_copies(copies);
    const int64_t growths = counters().host_allocations.load() - before;
    EXPECT_TRUE(reserved);
    EXPECT_EQ(copies.size(), 1u);
    pool.free_task(child);
    return growths;
  };
  for (int64_t child = 2; child < 5; ++child) round(child);
  for (int64_t child = 5; child < 50; ++child) EXPECT_EQ(round(child), 0);
}

}  // namespace
}  // namespace astrai::runtime
