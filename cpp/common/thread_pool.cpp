#include "common/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "common/check.h"
#include "common/counters.h"

namespace astrai {
namespace {

constexpr int kMaxThreads = 1024;
// About 50 microseconds of polling: longer than the gap between two kernels of a step, shorter than
// a scheduler's time slice.
constexpr int kSpinIterations = 2000;

void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int threads_from_environment() {
  const char* text = std::getenv("ASTRAI_NUM_THREADS");
  if (text == nullptr || *text == '\0') return 0;
  char* end = nullptr;
  errno = 0;
  const long value = std::strtol(text, &end, 10);
  ASTRAI_CHECK_ARG(errno == 0 && *end == '\0' && value >= 1 && value <= kMaxThreads,
                   "ASTRAI_NUM_THREADS: \"", text, "\"; expected a whole number from 1 to ",
                   kMaxThreads);
  return static_cast<int>(value);
}

int threads_from_affinity() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    const int cpus = CPU_COUNT(&set);
    if (cpus > 0) return cpus < kMaxThreads ? cpus : kMaxThreads;
  }
  const unsigned cpus = std::thread::hardware_concurrency();
  return cpus == 0 ? 1 : static_cast<int>(cpus);
}

class Pool {
 public:
  explicit Pool(int num_workers) {
    threads_.reserve(static_cast<size_t>(num_workers));
    for (int i = 0; i < num_workers; ++i) threads_.emplace_back([this] { work(); });
  }

  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_.store(true, std::memory_order_relaxed);
      job_.fetch_add(kNextJob, std::memory_order_release);
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  int num_workers() const { return static_cast<int>(threads_.size()); }

  void run(int64_t num_tasks, void (*fn)(void*, int64_t), void* context) {
    fn_ = fn;
    context_ = context;
    num_tasks_ = num_tasks;
    next_task_.store(0, std::memory_order_relaxed);
    // Opens the job: its number goes up, nobody has joined yet.
    const uint64_t job = job_.load(std::memory_order_relaxed) / kNextJob + 1;
    job_.store(job * kNextJob + kOpen, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
    drain();
    // Closes it: a worker that is still asleep, or was not given a CPU in time, misses the job and
    // nobody waits for it. Those that joined must leave before the context goes out of scope.
    uint64_t state = job_.fetch_and(~kOpen, std::memory_order_acq_rel) & ~kOpen;
    for (int spins = 0; state % kNextJob != 0; ++spins) {
      if (spins < kSpinIterations) {
        cpu_relax();
      } else {
        std::this_thread::yield();
      }
      state = job_.load(std::memory_order_acquire);
    }
  }

 private:
  // job_ holds the job's number, the count of workers in it, and in its lowest bit whether more may
  // join: number * kNextJob + workers * kOneWorker + open.
  static constexpr uint64_t kOpen = 1;
  static constexpr uint64_t kOneWorker = 2;
  static constexpr uint64_t kNextJob = 1 << 16;
  static_assert(kMaxThreads * kOneWorker < kNextJob);

  void drain() {
    for (;;) {
      const int64_t task = next_task_.fetch_add(1, std::memory_order_relaxed);
      if (task >= num_tasks_) return;
      fn_(context_, task);
    }
  }

  void work();

  // True when the calling worker is now part of job `number`.
  bool join(uint64_t number) {
    uint64_t state = job_.load(std::memory_order_acquire);
    while (state / kNextJob == number && (state & kOpen) != 0) {
      if (job_.compare_exchange_weak(state, state + kOneWorker, std::memory_order_acq_rel)) {
        return true;
      }
    }
    return false;
  }

  // Waits for a job other than `seen` and returns its number.
  uint64_t wait_for_next(uint64_t seen) {
    for (int spins = 0; spins < kSpinIterations; ++spins) {
      const uint64_t number = job_.load(std::memory_order_acquire) / kNextJob;
      if (number != seen) return number;
      cpu_relax();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(lock, [&] { return job_.load(std::memory_order_seq_cst) / kNextJob != seen; });
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
    return job_.load(std::memory_order_acquire) / kNextJob;
  }

  // The job, written by run() before it opens and read by workers that joined it.
  void (*fn_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
  int64_t num_tasks_ = 0;
  alignas(64) std::atomic<int64_t> next_task_{0};
  alignas(64) std::atomic<uint64_t> job_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> threads_;
};

thread_local bool inside_task = false;

void Pool::work() {
  inside_task = true;
  // A worker that starts late may still take part in the first job, so it counts from zero.
  uint64_t seen = 0;
  for (;;) {
    seen = wait_for_next(seen);
    if (stopping_.load(std::memory_order_relaxed)) return;
    if (!join(seen)) continue;
    drain();
    job_.fetch_sub(kOneWorker, std::memory_order_release);
  }
}

struct PoolState {
  std::mutex mutex;  // guards the pool and is held for the length of a job
  std::unique_ptr<Pool> pool;
  std::atomic<int> threads{0};  // 0: not decided yet
};

PoolState*& state_pointer() {
  // Never destroyed: workers may still be asleep in it while the process exits.
  static PoolState* state = [] {
    pthread_atfork(nullptr, nullptr, [] {
      // The workers do not exist in the child and the locks may be held by threads that do not
      // either, so the child leaves the parent's state alone and starts afresh.
      const int threads = state_pointer()->threads.load(std::memory_order_relaxed);
      state_pointer() = new PoolState;
      state_pointer()->threads.store(threads, std::memory_order_relaxed);
      inside_task = false;
    });
    return new PoolState;
  }();
  return state;
}

void run_serial(int64_t num_tasks, void (*fn)(void*, int64_t), void* context) {
  for (int64_t task = 0; task < num_tasks; ++task) fn(context, task);
}

struct ScratchBuffer {
  void* data = nullptr;
  size_t bytes = 0;
  ~ScratchBuffer() { std::free(data); }
};

}  // namespace

int num_threads() {
  PoolState& state = *state_pointer();
  int threads = state.threads.load(std::memory_order_relaxed);
  if (threads == 0) {
    threads = threads_from_environment();
    if (threads == 0) threads = threads_from_affinity();
    state.threads.store(threads, std::memory_order_relaxed);
  }
  return threads;
}

void set_num_threads(int n) {
  ASTRAI_CHECK_ARG(n >= 1 && n <= kMaxThreads, "set_num_threads: num_threads is ", n,
                   "; expected a whole number from 1 to ", kMaxThreads);
  state_pointer()->threads.store(n, std::memory_order_relaxed);
}

void detail::run_parallel(int64_t num_tasks, void (*fn)(void*, int64_t), void* context) {
  const int threads = num_threads();
  if (num_tasks <= 1 || threads == 1 || inside_task) return run_serial(num_tasks, fn, context);
  PoolState& state = *state_pointer();
  std::unique_lock<std::mutex> lock(state.mutex, std::try_to_lock);
  if (!lock.owns_lock()) return run_serial(num_tasks, fn, context);
  if (state.pool == nullptr || state.pool->num_workers() != threads - 1) {
    state.pool.reset();
    state.pool = std::make_unique<Pool>(threads - 1);
  }
  inside_task = true;
  state.pool->run(num_tasks, fn, context);
  inside_task = false;
}

void* thread_scratch(size_t bytes, int slot) {
  thread_local std::array<ScratchBuffer, kNumScratchSlots> buffers;
  ScratchBuffer& buffer = buffers.at(static_cast<size_t>(slot));
  if (buffer.bytes < bytes) {
    const size_t rounded = (bytes + 4095) / 4096 * 4096;
    std::free(buffer.data);
    buffer.data = nullptr;
    buffer.bytes = 0;
    buffer.data = std::aligned_alloc(64, rounded);
    if (buffer.data == nullptr) throw std::bad_alloc();
    buffer.bytes = rounded;
    count(counters().host_allocations);
  }
  return buffer.data;
}

}  // namespace astrai
