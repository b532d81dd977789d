// Splits the rows of an elementwise kernel over the thread pool.
#pragma once

#include <cstdint>

#include "common/thread_pool.h"
#include "kernels/cpu/vec.h"

namespace astrai::kernels::cpu::ASTRAI_ISA {

// Below this many bytes a second thread costs more than it saves: waking it takes a few
// microseconds, in which one core moves about this much through its cache.
constexpr int64_t kMinBytesPerTask = 32 * 1024;

// Calls fn(first_row, last_row) over [0, num_rows), each call worth kMinBytesPerTask or more; on
// the calling thread alone when there is less work than for two such calls.
template <class Fn>
inline void parallel_rows(int64_t num_rows, int64_t bytes_per_row, const Fn& fn) {
  const int64_t total_bytes = num_rows * bytes_per_row;
  if (total_bytes < 2 * kMinBytesPerTask || num_rows < 2) {
    if (num_rows > 0) fn(int64_t{0}, num_rows);
    return;
  }
  // Four tasks a thread even out threads that start late.
  int64_t num_tasks = total_bytes / kMinBytesPerTask;
  const int64_t max_tasks = 4 * int64_t{num_threads()};
  if (num_tasks > max_tasks) num_tasks = max_tasks;
  if (num_tasks > num_rows) num_tasks = num_rows;
  parallel_for(num_tasks, [&](int64_t task) {
    fn(num_rows * task / num_tasks, num_rows * (task + 1) / num_tasks);
  });
}

}  // namespace astrai::kernels::cpu::ASTRAI_ISA
