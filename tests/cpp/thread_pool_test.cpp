#include "common/thread_pool.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <vector>

namespace astrai {
namespace {

// Restores the thread count that a test changed.
class ThreadPool : public ::testing::Test {
 protected:
  void SetUp() override { saved_ = num_threads(); }
  void TearDown() override { set_num_threads(saved_); }

 private:
  int saved_ = 1;
};

TEST_F(ThreadPool, RunsEveryTaskExactlyOnce) {
  for (int threads : {1, 2, 3, 7}) {
    set_num_threads(threads);
    for (int64_t num_tasks : {0, 1, 2, 5, 1000}) {
      std::vector<std::atomic<int>> runs(static_cast<size_t>(num_tasks));
      parallel_for(num_tasks, [&](int64_t task) { runs[static_cast<size_t>(task)]++; });
      for (const auto& count : runs) EXPECT_EQ(count.load(), 1) << threads << " threads";
    }
  }
}

TEST_F(ThreadPool, WakesWorkersThatFellAsleep) {
  set_num_threads(3);
  for (int round = 0; round < 20; ++round) {
    std::atomic<int64_t> sum{0};
    parallel_for(100, [&](int64_t task) { sum += task; });
    EXPECT_EQ(sum.load(), 4950);
    std::this_thread::sleep_for(std::chrono::milliseconds(round % 3));
  }
}

TEST_F(ThreadPool, NestedJobsRunOnTheCallingThread) {
  set_num_threads(2);
  std::atomic<int> inner_runs{0};
  std::atomic<int> foreign_threads{0};
  parallel_for(8, [&](int64_t) {
    const std::thread::id caller = std::this_thread::get_id();
    parallel_for(4, [&](int64_t) {
      ++inner_runs;
      if (std::this_thread::get_id() != caller) ++foreign_threads;
    });
  });
  EXPECT_EQ(inner_runs.load(), 32);
  EXPECT_EQ(foreign_threads.load(), 0);
}

TEST_F(ThreadPool, ServesSeveralCallersAtOnce) {
  set_num_threads(2);
  std::atomic<int64_t> total{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] {
      for (int round = 0; round < 200; ++round) {
        parallel_for(16, [&](int64_t) { total += 1; });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(total.load(), 4 * 200 * 16);
}

TEST_F(ThreadPool, WorksInAForkedChild) {
  set_num_threads(2);
  parallel_for(4, [](int64_t) {});
  const pid_t child = fork();
  ASSERT_NE(child, -1);
  if (child == 0) {
    std::atomic<int> runs{0};
    parallel_for(64, [&](int64_t) { ++runs; });
    _exit(runs.load() == 64 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST_F(ThreadPool, RejectsThreadCountsOutOfRange) {
  EXPECT_THROW(set_num_threads(0), std::invalid_argument);
  EXPECT_THROW(set_num_threads(-1), std::invalid_argument);
  EXPECT_THROW(set_num_threads(1025), std::invalid_argument);
}

TEST(ThreadScratch, IsAlignedGrowsAndKeepsSlotsApart) {
  void* small = thread_scratch(10, 0);
  void* other = thread_scratch(10, 1);
  EXPECT_NE(small, other);
  void* large = thread_scratch(1 << 20, 0);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(large) % 64, 0u);
  EXPECT_EQ(thread_scratch(100, 0), large);
}

}  // namespace
}  // namespace astrai
