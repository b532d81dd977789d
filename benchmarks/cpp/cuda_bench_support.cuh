// What the benchmarks of CUDA kernels share: memory, inputs, timing, the shapes of the grid.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/cuda_check.h"
#include "common/dtype.h"

namespace astrai::bench {

constexpr int kReplays = 25;
constexpr int64_t kColdBytes = 200'000'000;  // several times the L2 of any current device

struct Shape {
  int64_t num_q_heads, num_kv_heads, head_dim;
};
constexpr Shape kShapes[] = {{32, 8, 128}, {24, 4, 64}, {16, 8, 128}, {9, 3, 64}, {8, 1, 256}};

class DeviceMemory {
 public:
  explicit DeviceMemory(int64_t bytes) {
    ASTRAI_CHECK_CUDA(cudaMalloc(&data_, static_cast<size_t>(bytes)));
  }
  ~DeviceMemory() { cudaFree(data_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

// Values in about [-1.7, 1.7] that differ from copy to copy: never zeros, which run faster.
static __global__ void fill_kernel(uint16_t* data, int64_t count, uint32_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761u + seed * 40503u;
    x ^= x >> 16;
    x *= 2246822519u;
    x ^= x >> 13;
    const float value = (static_cast<float>(x & 0xffffu) / 65535.0f - 0.5f) * 3.4f;
    data[i] = static_cast<uint16_t>(__float_as_uint(value) >> 16);
  }
}

inline void fill(void* data, int64_t elements, uint32_t seed) {
  fill_kernel<<<1024, 256>>>(static_cast<uint16_t*>(data), elements, seed);
  ASTRAI_CHECK_CUDA(cudaGetLastError());
}

struct Timing {
  double median_us = 0.0;
  double spread_us = 0.0;  // between the quartiles
};

// Captures all launches as one graph and replays it.
inline Timing time_graph(const std::vector<std::function<void(cudaStream_t)>>& launches) {
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ASTRAI_CHECK_CUDA(cudaStreamCreate(&stream));
  for (const auto& launch : launches) launch(stream);
  ASTRAI_CHECK_CUDA(cudaStreamSynchronize(stream));
  ASTRAI_CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (const auto& launch : launches) launch(stream);
  ASTRAI_CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  ASTRAI_CHECK_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  cudaEvent_t begin = nullptr, end = nullptr;
  ASTRAI_CHECK_CUDA(cudaEventCreate(&begin));
  ASTRAI_CHECK_CUDA(cudaEventCreate(&end));
  std::vector<double> samples;
  for (int i = 0; i < kReplays + 3; ++i) {
    ASTRAI_CHECK_CUDA(cudaEventRecord(begin, stream));
    ASTRAI_CHECK_CUDA(cudaGraphLaunch(executable, stream));
    ASTRAI_CHECK_CUDA(cudaEventRecord(end, stream));
    ASTRAI_CHECK_CUDA(cudaEventSynchronize(end));
    float ms = 0.0f;
    ASTRAI_CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 3) samples.push_back(ms * 1e3 / static_cast<double>(launches.size()));
  }
  ASTRAI_CHECK_CUDA(cudaEventDestroy(begin));
  ASTRAI_CHECK_CUDA(cudaEventDestroy(end));
  ASTRAI_CHECK_CUDA(cudaGraphExecDestroy(executable));
  ASTRAI_CHECK_CUDA(cudaGraphDestroy(graph));
  ASTRAI_CHECK_CUDA(cudaStreamDestroy(stream));
  std::sort(samples.begin(), samples.end());
  return {samples[samples.size() / 2],
          samples[samples.size() * 3 / 4] - samples[samples.size() / 4]};
}

// A random order of `count` things, the same in each run.
inline std::vector<int32_t> shuffled_indices(int64_t count) {
  std::vector<int32_t> indices(static_cast<size_t>(count));
  for (size_t i = 0; i < indices.size(); ++i) indices[i] = static_cast<int32_t>(i);
  uint64_t state = 88172645463325252u;
  for (size_t i = indices.size(); i > 1; --i) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    std::swap(indices[i - 1], indices[state % i]);
  }
  return indices;
}

inline std::unique_ptr<DeviceMemory> upload(const std::vector<int32_t>& values) {
  auto memory = std::make_unique<DeviceMemory>(static_cast<int64_t>(values.size()) * 4);
  ASTRAI_CHECK_CUDA(
      cudaMemcpy(memory->data(), values.data(), values.size() * 4, cudaMemcpyHostToDevice));
  return memory;
}

// bf16 elements as floats, once all queued work is done.
inline std::vector<float> download_bf16(const void* data, int64_t elements) {
  ASTRAI_CHECK_CUDA(cudaDeviceSynchronize());
  std::vector<uint16_t> bits(static_cast<size_t>(elements));
  ASTRAI_CHECK_CUDA(cudaMemcpy(bits.data(), data, bits.size() * 2, cudaMemcpyDeviceToHost));
  std::vector<float> values;
  values.reserve(bits.size());
  for (uint16_t b : bits) values.push_back(to_float(bf16{b}));
  return values;
}

// Largest difference relative to the largest expected value; infinite where a value is not finite.
inline double relative_error(const std::vector<float>& found, const std::vector<float>& expected) {
  double difference = 0.0, largest = 0.0;
  for (size_t i = 0; i < found.size(); ++i) {
    if (!std::isfinite(found[i])) return INFINITY;
    difference = std::max(difference, std::abs(double(found[i]) - expected[i]));
    largest = std::max(largest, std::abs(double(expected[i])));
  }
  return difference / largest;
}

// What a line of results says of the run: commit, GPU, versions, as members of a JSON object.
inline std::string run_facts() {
  int driver = 0, runtime = 0;
  cudaDeviceProp properties{};
  ASTRAI_CHECK_CUDA(cudaGetDeviceProperties(&properties, 0));
  ASTRAI_CHECK_CUDA(cudaDriverGetVersion(&driver));
  ASTRAI_CHECK_CUDA(cudaRuntimeGetVersion(&runtime));
  const char* commit = std::getenv("ASTRAI_COMMIT");
  return std::string("\"commit\": \"") + (commit == nullptr ? "unknown" : commit) +
         "\", \"gpu\": \"" + properties.name + "\", \"cuda_driver\": " + std::to_string(driver) +
         ", \"cuda_runtime\": " + std::to_string(runtime) + ", \"dtype\": \"bfloat16\"";
}

// The next word of the command line, for an option that takes a value.
using NextArgument = std::function<std::string()>;

// Calls apply(argument, next) for each option; it returns false for one that it does not know.
template <class Fn>
void for_each_argument(int argc, char** argv, Fn&& apply) {
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const NextArgument next = [&] {
      if (i + 1 >= argc) throw std::invalid_argument(argument + ": expected a value");
      return std::string(argv[++i]);
    };
    if (!apply(argument, next)) throw std::invalid_argument("unknown argument " + argument);
  }
}

// The file that lines of results are appended to; null for an empty path.
inline FILE* open_results(const std::string& path) {
  FILE* file = path.empty() ? nullptr : std::fopen(path.c_str(), "a");
  if (!path.empty() && file == nullptr) throw std::runtime_error("cannot write " + path);
  return file;
}

// What main returns: run's result, or 2 with the error's text on stderr.
template <class Fn>
int report_errors(const char* program, Fn&& run) {
  try {
    return run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", program, error.what());
    return 2;
  }
}

}  // namespace astrai::bench
