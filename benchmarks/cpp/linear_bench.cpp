// Times the linear kernel on the layer shapes of a 135M-parameter Llama model (hidden size 576).
//
// Weights are read from memory, not from cache: each call takes the next of enough copies to exceed
// any cache. The floor is the time that reading the weights and inputs and writing the outputs
// takes at the bandwidth measured in the same round. Prints one JSON line per shape and number of
// rows.
//
//   linear_bench [--dtype bfloat16|float16|float32] [--threads N] [--rounds N] [--isa NAME]
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>

#include "bench_support.h"
#include "common/dtype.h"
#include "kernels/cpu/isa.h"
#include "kernels/linear/linear.h"

namespace astrai::bench {
namespace {

struct Options {
  DType dtype = DType::kBFloat16;
  int threads = 2;
  int rounds = 15;
  std::string isa;
};

struct Shape {
  const char* name;
  int64_t num_outputs;
  int64_t num_inputs;
};

constexpr Shape kShapes[] = {
    {"qkv", 960, 576},   {"o", 576, 576},      {"gate_up", 3072, 576},
    {"down", 576, 1536}, {"head", 49152, 576},
};
constexpr int64_t kRowCounts[] = {1, 8, 64, 512};

// More than the last-level cache of the machines in use.
constexpr int64_t kColdBytes = 160 * 1024 * 1024;

struct Buffers {
  std::vector<char> weights;  // copies of [N, K]
  std::vector<char> x;        // [M, K]
  std::vector<float> out;     // [M, N]
  int64_t num_copies = 0;
  int64_t copy_bytes = 0;
};

template <class T>
void fill(std::vector<char>& bytes, int64_t count, std::mt19937& random) {
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  bytes.resize(static_cast<size_t>(count) * sizeof(T));
  for (int64_t i = 0; i < count; ++i) {
    const T value = from_float<T>(uniform(random));
    std::memcpy(bytes.data() + i * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
  }
}

Buffers make_buffers(const Shape& shape, int64_t num_rows, DType dtype) {
  Buffers buffers;
  std::mt19937 random(1);
  std::vector<char> weight;
  dispatch_float_dtype(dtype, [&]<class T>() {
    fill<T>(weight, shape.num_outputs * shape.num_inputs, random);
    fill<T>(buffers.x, num_rows * shape.num_inputs, random);
  });
  buffers.copy_bytes = static_cast<int64_t>(weight.size());
  buffers.num_copies = kColdBytes / buffers.copy_bytes + 1;
  buffers.weights.reserve(static_cast<size_t>(buffers.num_copies) * weight.size());
  for (int64_t i = 0; i < buffers.num_copies; ++i) {
    buffers.weights.insert(buffers.weights.end(), weight.begin(), weight.end());
  }
  buffers.out.resize(static_cast<size_t>(num_rows * shape.num_outputs));
  return buffers;
}

double element(const char* data, DType dtype, int64_t index) {
  double value = 0.0;
  dispatch_float_dtype(dtype, [&]<class T>() {
    T item;
    std::memcpy(&item, data + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
    value = to_float(item);
  });
  return value;
}

void run_once(Buffers& buffers, const Shape& shape, int64_t num_rows, DType dtype, int64_t copy) {
  char* weight = buffers.weights.data() + copy % buffers.num_copies * buffers.copy_bytes;
  kernels::linear(
      TensorView::contiguous(buffers.x.data(), dtype, {num_rows, shape.num_inputs}),
      TensorView::contiguous(weight, dtype, {shape.num_outputs, shape.num_inputs}), nullptr,
      TensorView::contiguous(buffers.out.data(), DType::kFloat32, {num_rows, shape.num_outputs}),
      nullptr);
}

void verify(Buffers& buffers, const Shape& shape, int64_t num_rows, DType dtype) {
  run_once(buffers, shape, num_rows, dtype, 0);
  for (int64_t m = 0; m < num_rows; ++m) {
    for (int64_t n = m % 97; n < shape.num_outputs; n += 97) {
      double expected = 0.0;
      for (int64_t k = 0; k < shape.num_inputs; ++k) {
        expected += element(buffers.x.data(), dtype, m * shape.num_inputs + k) *
                    element(buffers.weights.data(), dtype, n * shape.num_inputs + k);
      }
      const double found = buffers.out[static_cast<size_t>(m * shape.num_outputs + n)];
      if (!(std::abs(found - expected) <= 1e-4)) {
        throw std::runtime_error(concat("linear_bench: ", shape.name, " out[", m, ", ", n, "] is ",
                                        found, "; expected ", expected));
      }
    }
  }
}

void measure(const Shape& shape, int64_t num_rows, const Options& options,
             const std::vector<uint64_t>& memory, const std::string& run_facts) {
  Buffers buffers = make_buffers(shape, num_rows, options.dtype);
  verify(buffers, shape, num_rows, options.dtype);
  const double flops = 2.0 * static_cast<double>(num_rows * shape.num_outputs * shape.num_inputs);
  const double bytes = static_cast<double>(buffers.copy_bytes) +
                       static_cast<double>(buffers.x.size() + 4 * buffers.out.size());
  // Enough calls a sample to make reading the clock free.
  const int64_t calls = std::clamp<int64_t>(static_cast<int64_t>(2e8 / flops), 1, 64);
  std::vector<double> samples;
  std::vector<double> reads;
  int64_t copy = 1;
  for (int round = 0; round < options.rounds; ++round) {
    reads.push_back(time_read(memory));
    const double start = seconds_now();
    for (int64_t i = 0; i < calls; ++i) {
      run_once(buffers, shape, num_rows, options.dtype, copy++);
    }
    samples.push_back((seconds_now() - start) / static_cast<double>(calls));
  }
  const Timing timing = summarize(samples);
  const Timing read = summarize(reads);
  const double memory_bytes = static_cast<double>(memory.size() * sizeof(uint64_t));
  const double floor_best = bytes / (memory_bytes / read.best_s);
  const double floor_median = bytes / (memory_bytes / read.median_s);
  std::printf(
      "{\"bench\": \"linear\", %s, \"layer\": \"%s\", \"m\": %lld, \"n\": %lld, \"k\": %lld, "
      "\"best_us\": %.1f, \"median_us\": %.1f, \"gb_per_s\": %.2f, \"read_gb_per_s\": %.2f, "
      "\"best_over_floor\": %.3f, \"median_over_floor\": %.3f, \"gflops\": %.1f}\n",
      run_facts.c_str(), shape.name, static_cast<long long>(num_rows),
      static_cast<long long>(shape.num_outputs), static_cast<long long>(shape.num_inputs),
      timing.best_s * 1e6, timing.median_s * 1e6, bytes / timing.best_s / 1e9,
      memory_bytes / read.best_s / 1e9, timing.best_s / floor_best, timing.median_s / floor_median,
      flops / timing.best_s / 1e9);
  std::fflush(stdout);
}

DType parse_dtype(const std::string& name) {
  for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    if (name == dtype_name(dtype)) return dtype;
  }
  throw std::invalid_argument(
      concat("--dtype: ", name, "; expected one of float32, float16, bfloat16"));
}

int parse_count(const std::string& option, const std::string& text) {
  const int value = std::atoi(text.c_str());
  ASTRAI_CHECK_ARG(value >= 1, option, ": ", text, "; expected a whole number >= 1");
  return value;
}

Options parse_options(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i += 2) {
    const std::string option = argv[i];
    ASTRAI_CHECK_ARG(i + 1 < argc, option, ": no value; expected one");
    const std::string value = argv[i + 1];
    if (option == "--dtype") {
      options.dtype = parse_dtype(value);
    } else if (option == "--threads") {
      options.threads = parse_count(option, value);
    } else if (option == "--rounds") {
      options.rounds = parse_count(option, value);
    } else if (option == "--isa") {
      options.isa = value;
    } else {
      throw std::invalid_argument(
          concat(option, ": unknown; expected --dtype, --threads, --rounds or --isa"));
    }
  }
  return options;
}

void run(const Options& options) {
  set_num_threads(options.threads);
  if (!options.isa.empty()) kernels::cpu::force_isa(options.isa);
  const std::vector<uint64_t> memory(static_cast<size_t>(kColdBytes) / sizeof(uint64_t), 1);
  const std::string commit = first_line_of("git -C '" ASTRAI_SOURCE_DIR "' rev-parse HEAD");
  const std::string facts =
      concat("\"commit\": \"", commit, "\", \"cpu\": \"", cpu_model(), "\", \"isa\": \"",
             kernels::cpu::cpu_kernels().isa, "\", \"threads\": ", options.threads,
             ", \"dtype\": \"", dtype_name(options.dtype), "\"");
  for (const Shape& shape : kShapes) {
    for (int64_t num_rows : kRowCounts) measure(shape, num_rows, options, memory, facts);
  }
}

}  // namespace
}  // namespace astrai::bench

int main(int argc, char** argv) {
  try {
    astrai::bench::run(astrai::bench::parse_options(argc, argv));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "linear_bench: %s\n", error.what());
    return 2;
  }
}
