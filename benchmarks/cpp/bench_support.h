// What the C++ benchmarks share: timing, memory bandwidth of this run, facts about the machine.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "common/thread_pool.h"

namespace astrai::bench {

inline double seconds_now() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

struct Timing {
  double best_s = 0.0;
  double median_s = 0.0;
};

inline Timing summarize(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  return {.best_s = samples.front(), .median_s = samples[samples.size() / 2]};
}

// Seconds that all threads together take to read `words` once.
inline double time_read(const std::vector<uint64_t>& words) {
  typedef uint64_t Quad __attribute__((vector_size(32), aligned(8), may_alias));
  constexpr int64_t kChunkWords = 128 * 1024;  // 1 MiB
  const int64_t num_chunks = static_cast<int64_t>(words.size()) / kChunkWords;
  const double start = seconds_now();
  parallel_for(num_chunks, [&](int64_t chunk) {
    const uint64_t* first = words.data() + chunk * kChunkWords;
    Quad sums[4] = {};
    for (int64_t i = 0; i < kChunkWords; i += 16) {
      for (int lane = 0; lane < 4; ++lane) {
        sums[lane] += *reinterpret_cast<const Quad*>(first + i + 4 * lane);
      }
    }
    const Quad sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    // The value is never used, but the compiler must not know.
    asm volatile("" ::"r"(sum[0] + sum[1] + sum[2] + sum[3]) : "memory");
  });
  return seconds_now() - start;
}

inline std::string first_line_of(const char* command) {
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command, "r"), pclose);
  char line[256] = "";
  if (pipe == nullptr || fgets(line, sizeof(line), pipe.get()) == nullptr) return "unknown";
  std::string text = line;
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

inline std::string cpu_model() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

}  // namespace astrai::bench
