// Times paged decode attention against the time that reading its keys and values takes.
//
// Every call reads keys and values that no cache holds: the calls go round enough page pools to
// exceed any cache. The floor is the KV bytes at the bandwidth that the same threads reach,
// measured in the same rounds. "cached_us" is the time on a single pool, which stays in the
// last-level cache: what the arithmetic alone takes. Prints one JSON line per configuration.
//
//   attn_decode_bench [--dtype float32|float16|bfloat16] [--threads N] [--rounds N] [--isa NAME]
//                     [--commit TEXT]
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <stdexcept>

#include "bench_support.h"
#include "common/check.h"
#include "common/dtype.h"
#include "kernels/attention/attn_launch.h"
#include "kernels/cpu/isa.h"

namespace astrai::bench {
namespace {

struct Options {
  std::vector<DType> dtypes{DType::kBFloat16, DType::kFloat16, DType::kFloat32};
  int threads = 2;
  int rounds = 15;
  std::string isa;
  std::string commit = first_line_of("git -C '" ASTRAI_SOURCE_DIR "' rev-parse HEAD");
};

// Pages of a request as a fresh pool hands them out, or scattered over the whole pool.
enum class PageOrder { kRising, kShuffled };

struct Shape {
  int64_t num_requests;
  int64_t kv_len;
  int64_t num_q_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t page_size;
  PageOrder page_order = PageOrder::kRising;
};

constexpr Shape kShapes[] = {
    {1, 4096, 9, 3, 64, 16},                        // SmolLM2-135M
    {1, 4096, 9, 3, 64, 16, PageOrder::kShuffled},  //
    {8, 4096, 9, 3, 64, 16},                        //
    {1, 4096, 9, 3, 64, 1},                         // a token table
    {1, 512, 9, 3, 64, 16},                         //
    {1, 4096, 32, 8, 64, 16},                       // Llama-3.2-1B
    {1, 4096, 28, 4, 128, 16},                      // Qwen2.5-7B
};

// More than the last-level cache of the machines in use.
constexpr int64_t kColdBytes = 160 * 1024 * 1024;

// One sample of the read bandwidth.
constexpr int64_t kReadBytes = 16 * 1024 * 1024;

template <class T>
void fill(std::vector<char>& bytes, int64_t count, std::mt19937& random) {
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  bytes.resize(static_cast<size_t>(count) * sizeof(T));
  for (int64_t i = 0; i < count; ++i) {
    const T value = from_float<T>(uniform(random));
    std::memcpy(bytes.data() + i * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
  }
}

double element(const void* data, DType dtype, int64_t index) {
  double value = 0.0;
  dispatch_float_dtype(dtype,
                       [&]<class T>() { value = to_float(static_cast<const T*>(data)[index]); });
  return value;
}

// Queries, one pool of pages, and for each call a page list of its own in it.
class Problem {
 public:
  Problem(const Shape& shape, DType dtype)
      : shape_(shape),
        dtype_(dtype),
        pages_each_((shape.kv_len + shape.page_size - 1) / shape.page_size),
        page_bytes_(shape.page_size * shape.num_kv_heads * shape.head_dim * dtype_bytes(dtype)),
        num_calls_(kColdBytes / (2 * pages_each_ * shape.num_requests * page_bytes_) + 2),
        num_pages_(num_calls_ * pages_each_ * shape.num_requests),
        k_(static_cast<size_t>(num_pages_ * page_bytes_)),
        v_(static_cast<size_t>(num_pages_ * page_bytes_)),
        indices_(static_cast<size_t>(num_pages_)) {
    std::mt19937 random(1);
    std::vector<char> page;
    dispatch_float_dtype(dtype, [&]<class T>() {
      fill<T>(q_, shape.num_requests * shape.num_q_heads * shape.head_dim, random);
      // A few different pages, repeated: random numbers take long to draw.
      fill<T>(page, 64 * page_bytes_ / dtype_bytes(dtype), random);
    });
    for (int64_t i = 0; i < num_pages_; ++i) {
      std::memcpy(k_.data() + i * page_bytes_, page.data() + i % 64 * page_bytes_,
                  static_cast<size_t>(page_bytes_));
      std::memcpy(v_.data() + i * page_bytes_, page.data() + (i + 13) % 64 * page_bytes_,
                  static_cast<size_t>(page_bytes_));
    }
    out_.resize(q_.size());
    std::iota(indices_.begin(), indices_.end(), 0);
    if (shape.page_order == PageOrder::kShuffled) {
      std::shuffle(indices_.begin(), indices_.end(), random);
    }
    for (int64_t b = 0; b <= shape.num_requests; ++b) {
      indptr_.push_back(static_cast<int32_t>(b * pages_each_));
    }
    lens_.assign(static_cast<size_t>(shape.num_requests), static_cast<int32_t>(shape.kv_len));
  }

  int64_t num_calls() const { return num_calls_; }

  int64_t kv_bytes() const {
    return 2 * shape_.num_requests * shape_.kv_len * shape_.num_kv_heads * shape_.head_dim *
           dtype_bytes(dtype_);
  }

  // The page list of one call.
  int32_t* pages_of(int64_t call) {
    return indices_.data() + call % num_calls_ * pages_each_ * shape_.num_requests;
  }

  void run(int64_t call) {
    const auto pages = [&](std::vector<char>& buffer) {
      return TensorView::contiguous(
          buffer.data(), dtype_,
          {num_pages_, shape_.page_size, shape_.num_kv_heads, shape_.head_dim});
    };
    const auto list = [](int32_t* values, int64_t count) {
      return TensorView::contiguous(values, DType::kInt32, {count});
    };
    const std::initializer_list<int64_t> rows{shape_.num_requests, shape_.num_q_heads,
                                              shape_.head_dim};
    kernels::attn_paged_decode(TensorView::contiguous(q_.data(), dtype_, rows),
                               {pages(k_), pages(v_), list(indptr_.data(), shape_.num_requests + 1),
                                list(pages_of(call), pages_each_ * shape_.num_requests),
                                list(lens_.data(), shape_.num_requests)},
                               TensorView::contiguous(out_.data(), dtype_, rows), {});
  }

  // Compares one output row with the definition.
  void verify() {
    run(0);
    const int64_t request = shape_.num_requests - 1;
    const int64_t head = shape_.num_q_heads - 1;
    const int64_t kv_head = shape_.num_kv_heads - 1;
    const int64_t dim = shape_.head_dim;
    const int64_t row = (request * shape_.num_q_heads + head) * dim;
    double sum = 0.0;
    std::vector<double> expected(static_cast<size_t>(dim), 0.0);
    for (int64_t key = 0; key < shape_.kv_len; ++key) {
      const int64_t page = pages_of(0)[request * pages_each_ + key / shape_.page_size];
      const int64_t at =
          ((page * shape_.page_size + key % shape_.page_size) * shape_.num_kv_heads + kv_head) *
          dim;
      double dot = 0.0;
      for (int64_t d = 0; d < dim; ++d) {
        dot += element(q_.data(), dtype_, row + d) * element(k_.data(), dtype_, at + d);
      }
      const double weight = std::exp(dot / std::sqrt(static_cast<double>(dim)));
      sum += weight;
      for (int64_t d = 0; d < dim; ++d) {
        expected[static_cast<size_t>(d)] += weight * element(v_.data(), dtype_, at + d);
      }
    }
    const double tolerance = dtype_ == DType::kFloat32 ? 1e-5 : 1e-3;
    for (int64_t d = 0; d < dim; ++d) {
      const double found = element(out_.data(), dtype_, row + d);
      const double right = expected[static_cast<size_t>(d)] / sum;
      ASTRAI_CHECK_STATE(std::abs(found - right) <= tolerance, "attn_decode_bench: out[", d,
                         "] is ", found, "; expected ", right);
    }
  }

 private:
  Shape shape_;
  DType dtype_;
  int64_t pages_each_;
  int64_t page_bytes_;
  int64_t num_calls_;
  int64_t num_pages_;
  std::vector<char> k_;
  std::vector<char> v_;
  std::vector<int32_t> indices_;
  std::vector<char> q_;
  std::vector<char> out_;
  std::vector<int32_t> indptr_;
  std::vector<int32_t> lens_;
};

void measure(const Shape& shape, DType dtype, const Options& options,
             const std::vector<std::vector<uint64_t>>& memory) {
  Problem problem(shape, dtype);
  problem.verify();
  // Single calls are the samples, so that a best one exists on a machine that does other work too.
  std::vector<double> reads, cold, cached;
  const auto seconds_of = [&](int64_t call) {
    const double start = seconds_now();
    problem.run(call);
    return seconds_now() - start;
  };
  for (int round = 0; round < options.rounds; ++round) {
    for (const auto& part : memory) reads.push_back(time_read(part));
    for (int64_t call = 0; call < problem.num_calls(); ++call) cold.push_back(seconds_of(call));
    problem.run(0);
    for (int i = 0; i < 8; ++i) cached.push_back(seconds_of(0));
  }
  const Timing read = summarize(reads);
  const Timing time = summarize(cold);
  const double memory_bytes = static_cast<double>(memory[0].size() * sizeof(uint64_t));
  const auto bytes = static_cast<double>(problem.kv_bytes());
  std::printf(
      "{\"bench\": \"attn_paged_decode\", \"commit\": \"%s\", \"cpu\": \"%s\", \"isa\": \"%s\", "
      "\"threads\": %d, \"dtype\": \"%s\", \"requests\": %lld, \"kv_len\": %lld, \"heads\": "
      "\"%lld:%lld\", \"head_dim\": %lld, \"page_size\": %lld, \"page_order\": \"%s\", "
      "\"best_us\": %.1f, \"median_us\": "
      "%.1f, \"cached_us\": %.1f, \"gb_per_s\": %.2f, \"read_gb_per_s\": %.2f, "
      "\"best_over_floor\": %.3f, \"median_over_floor\": %.3f}\n",
      options.commit.c_str(), cpu_model().c_str(), kernels::cpu::cpu_kernels().isa, options.threads,
      std::string(dtype_name(dtype)).c_str(), static_cast<long long>(shape.num_requests),
      static_cast<long long>(shape.kv_len), static_cast<long long>(shape.num_q_heads),
      static_cast<long long>(shape.num_kv_heads), static_cast<long long>(shape.head_dim),
      static_cast<long long>(shape.page_size),
      shape.page_order == PageOrder::kShuffled ? "shuffled" : "rising", time.best_s * 1e6,
      time.median_s * 1e6, summarize(cached).best_s * 1e6, bytes / time.best_s / 1e9,
      memory_bytes / read.best_s / 1e9, time.best_s / (bytes / (memory_bytes / read.best_s)),
      time.median_s / (bytes / (memory_bytes / read.median_s)));
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
      options.dtypes = {parse_dtype(value)};
    } else if (option == "--threads") {
      options.threads = parse_count(option, value);
    } else if (option == "--rounds") {
      options.rounds = parse_count(option, value);
    } else if (option == "--isa") {
      options.isa = value;
    } else if (option == "--commit") {
      options.commit = value;
    } else {
      throw std::invalid_argument(
          concat(option, ": unknown; expected --dtype, --threads, --rounds, --isa or --commit"));
    }
  }
  return options;
}

void run(const Options& options) {
  set_num_threads(options.threads);
  if (!options.isa.empty()) kernels::cpu::force_isa(options.isa);
  const std::vector<std::vector<uint64_t>> memory(
      kColdBytes / kReadBytes, std::vector<uint64_t>(kReadBytes / sizeof(uint64_t), 1));
  for (const Shape& shape : kShapes) {
    for (DType dtype : options.dtypes) measure(shape, dtype, options, memory);
  }
}

}  // namespace
}  // namespace astrai::bench

int main(int argc, char** argv) {
  try {
    astrai::bench::run(astrai::bench::parse_options(argc, argv));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "attn_decode_bench: %s\n", error.what());
    return 2;
  }
}
