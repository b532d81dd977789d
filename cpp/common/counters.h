// Process-wide event counters. They live at the bottom so that every layer can count; tests read
// them to prove that the steady decode loop allocates nothing and does not synchronise.
#pragma once

#include <atomic>
#include <cstdint>

namespace astrai {

struct Counters {
  std::atomic<int64_t> device_allocations{0};  // device memory requests by kernels or runtime
  std::atomic<int64_t> host_allocations{0};    // scratch and workspace growth on the host
  std::atomic<int64_t> launches{0};            // kernels started, on any device
  std::atomic<int64_t> h2d_bytes{0};           // bytes copied from host to device
  std::atomic<int64_t> graph_replays{0};
  std::atomic<int64_t> synchronizations{0};  // waits of the host for a device

  void reset() {
    device_allocations = 0;
    host_allocations = 0;
    launches = 0;
    h2d_bytes = 0;
    graph_replays = 0;
    synchronizations = 0;
  }
};

inline Counters& counters() {
  static Counters instance;
  return instance;
}

inline void count(std::atomic<int64_t>& counter, int64_t amount = 1) {
  counter.fetch_add(amount, std::memory_order_relaxed);
}

}  // namespace astrai
