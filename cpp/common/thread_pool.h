// One pool of worker threads for all CPU kernels.
//
// The pool starts at the first parallel_for, never at import. After fork() the child starts its
// own. Workers spin briefly for the next job, since a decode step issues hundreds of short ones,
// and then sleep. A parallel_for inside a task, or one that finds the pool busy with another
// caller's job, runs on the calling thread: slower, never a deadlock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace astrai {

// Threads that a job may use, the caller included: ASTRAI_NUM_THREADS, else the CPUs in this
// process's affinity mask. Throws std::invalid_argument when ASTRAI_NUM_THREADS is not a number
// from 1 to 1024.
int num_threads();

// Changes the number of threads for later jobs. Throws std::invalid_argument unless 1 <= n <= 1024.
void set_num_threads(int n);

namespace detail {
void run_parallel(int64_t num_tasks, void (*fn)(void* context, int64_t task), void* context);
}  // namespace detail

// Calls fn(task) once for every task in [0, num_tasks), in any order, on any thread of the pool,
// and returns when all are done. fn must not throw. Tasks are handed out one by one, so make each
// worth at least a few microseconds.
template <class Fn>
void parallel_for(int64_t num_tasks, Fn&& fn) {
  using Body = std::remove_reference_t<Fn>;
  detail::run_parallel(
      num_tasks, [](void* context, int64_t task) { (*static_cast<Body*>(context))(task); },
      const_cast<void*>(static_cast<const void*>(&fn)));
}

// Scratch memory of the calling thread, 64-byte aligned and at least `bytes` long. It grows and is
// never shrunk; the next call on the same thread with the same slot may return the same memory.
// `slot` keeps apart buffers that one task holds at the same time.
void* thread_scratch(size_t bytes, int slot = 0);
constexpr int kNumScratchSlots = 4;

}  // namespace astrai
