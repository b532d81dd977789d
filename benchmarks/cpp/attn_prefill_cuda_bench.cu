// Causal prefill attention on one GPU: verifies each shape against the scalar kernel, then times
// it.
//
//   attn_prefill_cuda_bench [--json FILE] [--quick] [--page-size N]... [--narrow | --split |
//   --wide]
//                           [--shape I] [--point I]
//
// Page size 0 is the dense entry point; without --page-size it is timed, and page size 16 with
// pages in random order. --quick leaves out the last two shapes and the longest prompt; --shape and
// --point keep one of each.
//
// Cold cache: a CUDA graph of launches over several copies of all tensors, together larger than L2.
// Times are medians over graph replays, in microseconds per launch, between device events. TFLOP/s
// count the products that a causal row needs: B * 2 * 2 * Hq * D * L (L + 1) / 2. One JSON line per
// point.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/cuda_check.h"
#include "cuda_bench_support.cuh"
#include "kernels/attention/attn_cuda_launch.h"
#include "kernels/attention/attn_launch.h"

namespace astrai::bench {
namespace {

struct Point {
  int64_t num_requests, length;
};
constexpr Point kPoints[] = {{1, 512},  {4, 512},  {1, 2048}, {4, 2048},
                             {1, 8192}, {4, 8192}, {1, 32768}};

struct Options {
  std::string json_path;
  bool quick = false;
  kernels::PrefillVariant variant = kernels::PrefillVariant::kAuto;
  std::vector<int64_t> page_sizes;
  int64_t only_shape = -1;
  int64_t only_point = -1;
};

// One grid point: copies of q, k, v and out; pages of a shuffled list where page_size > 0.
class PrefillProblem {
 public:
  PrefillProblem(const Shape& shape, const Point& point, int64_t page_size,
                 kernels::PrefillVariant variant)
      : shape_(shape), point_(point), page_size_(page_size), variant_(variant) {
    const int64_t tokens = point.num_requests * point.length;
    q_elements_ = tokens * shape.num_q_heads * shape.head_dim;
    kv_elements_ = tokens * shape.num_kv_heads * shape.head_dim;
    const int64_t bytes = (q_elements_ + kv_elements_) * 4;
    num_copies_ = std::clamp<int64_t>(kColdBytes / bytes + 1, 2, 16);
    for (int64_t c = 0; c < num_copies_; ++c) {
      kv_.push_back(filled(kv_elements_ * 2, static_cast<uint32_t>(c + 1)));
      q_.push_back(filled(q_elements_, static_cast<uint32_t>(c + 100)));
      out_.push_back(std::make_unique<DeviceMemory>(q_elements_ * 2));
    }
    std::vector<int32_t> qo_indptr, kv_indptr;
    const int64_t pages_each = page_size > 0 ? point.length / page_size : 0;
    for (int64_t b = 0; b <= point.num_requests; ++b) {
      qo_indptr.push_back(static_cast<int32_t>(b * point.length));
      kv_indptr.push_back(static_cast<int32_t>(b * pages_each));
    }
    qo_indptr_ = upload(qo_indptr);
    kv_indptr_ = upload(kv_indptr);
    num_pages_ = pages_each * point.num_requests;
    indices_ = upload(shuffled_indices(std::max<int64_t>(num_pages_, 1)));
    lens_ = upload(std::vector<int32_t>(static_cast<size_t>(point.num_requests),
                                        static_cast<int32_t>(point.length)));
  }

  double flop() const {
    return 2.0 * 2.0 *
           static_cast<double>(point_.num_requests * shape_.num_q_heads * shape_.head_dim) *
           (0.5 * static_cast<double>(point_.length) * static_cast<double>(point_.length + 1));
  }

  // Every query of the batch.
  void launch(int64_t copy, cudaStream_t stream) {
    if (page_size_ == 0) return launch_dense(copy, 0, point_.length, stream);
    const int64_t b = point_.num_requests;
    const auto rows = [&](void* data) {
      return view(data, DType::kBFloat16, {b * point_.length, shape_.num_q_heads, shape_.head_dim});
    };
    const auto pages = [&](void* data) {
      return view(data, DType::kBFloat16,
                  {num_pages_, page_size_, shape_.num_kv_heads, shape_.head_dim});
    };
    auto* kv = static_cast<uint16_t*>(kv_[static_cast<size_t>(copy)]->data());
    const TensorView k = pages(kv), v = pages(kv + kv_elements_);
    const TensorView kv_indptr = view(kv_indptr_->data(), DType::kInt32, {b + 1});
    const TensorView qo_indptr = view(qo_indptr_->data(), DType::kInt32, {b + 1});
    const TensorView indices = view(indices_->data(), DType::kInt32, {num_pages_});
    const TensorView lens = view(lens_->data(), DType::kInt32, {b});
    kernels::AttentionOptions options;
    options.stream = stream;
    kernels::attn_paged_prefill(rows(q_[static_cast<size_t>(copy)]->data()),
                                {k, v, kv_indptr, indices, lens}, qo_indptr,
                                rows(out_[static_cast<size_t>(copy)]->data()), {}, options);
  }

  // Largest difference from the scalar kernel, relative to the largest value. Long prompts are
  // compared where they begin and end; a paged one with the tensor-core kernel on dense keys,
  // which has been compared so itself.
  double verify() {
    poison();
    kernels::force_prefill_variant(variant_);
    launch(0, nullptr);
    const std::vector<float> found = download_bf16(out_[0]->data(), q_elements_);
    poison();
    if (page_size_ > 0) {
      return relative_error(found, gathered());
    }
    kernels::force_prefill_variant(kernels::PrefillVariant::kScalar);
    const int64_t some = std::min<int64_t>(point_.length, 256);
    launch_dense(0, 0, some, nullptr);
    launch_dense(0, point_.length - some, some, nullptr);
    kernels::force_prefill_variant(variant_);
    std::vector<float> expected = download_bf16(out_[0]->data(), q_elements_);
    for (size_t i = 0; i < expected.size(); ++i) {
      const int64_t token =
          static_cast<int64_t>(i) / (shape_.num_q_heads * shape_.head_dim) % point_.length;
      if (token >= some && token < point_.length - some) expected[i] = found[i];
    }
    return relative_error(found, expected);
  }

  Timing time() {
    std::vector<std::function<void(cudaStream_t)>> launches;
    for (int64_t c = 0; c < num_copies_; ++c) {
      launches.push_back([=, this](cudaStream_t stream) { launch(c, stream); });
    }
    return time_graph(launches);
  }

 private:
  static std::unique_ptr<DeviceMemory> filled(int64_t elements, uint32_t seed) {
    auto memory = std::make_unique<DeviceMemory>(elements * 2);
    fill(memory->data(), elements, seed);
    return memory;
  }

  static TensorView view(void* data, DType dtype, std::initializer_list<int64_t> extents) {
    return TensorView::contiguous(data, dtype, extents, {DeviceType::kCuda, 0});
  }

  void poison() {
    ASTRAI_CHECK_CUDA(cudaMemset(out_[0]->data(), 0xff, static_cast<size_t>(q_elements_ * 2)));
  }

  // Queries [first, first + count) of each request over keys that lie as tokens.
  void launch_dense(int64_t copy, int64_t first, int64_t count, cudaStream_t stream) {
    const auto at = static_cast<size_t>(copy);
    const int64_t b = point_.num_requests;
    const auto some_rows = [&](void* data) {
      const int64_t row = shape_.num_q_heads * shape_.head_dim;
      TensorView rows = view(static_cast<uint16_t*>(data) + first * row, DType::kBFloat16,
                             {b, point_.length, shape_.num_q_heads, shape_.head_dim});
      rows.shape[1] = count;
      return rows;
    };
    const auto keys = [&](void* data) {
      return view(data, DType::kBFloat16, {b, point_.length, shape_.num_kv_heads, shape_.head_dim});
    };
    auto* kv = static_cast<uint16_t*>(kv_[at]->data());
    kernels::AttentionOptions options;
    options.stream = stream;
    kernels::attn_prefill(some_rows(q_[at]->data()), keys(kv), keys(kv + kv_elements_),
                          some_rows(out_[at]->data()), first, options);
  }

  // The dense kernel's result over keys and values that are brought from their pages to the order
  // of the tokens.
  std::vector<float> gathered() {
    const int64_t page_bytes = page_size_ * shape_.num_kv_heads * shape_.head_dim * 2;
    auto tokens = std::make_unique<DeviceMemory>(kv_elements_ * 4);
    auto* to = static_cast<char*>(tokens->data());
    const auto* from = static_cast<const char*>(kv_[0]->data());
    const std::vector<int32_t> indices = shuffled_indices(num_pages_);
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t base = half * kv_elements_ * 2;
      for (int64_t i = 0; i < num_pages_; ++i) {
        ASTRAI_CHECK_CUDA(cudaMemcpyAsync(
            to + base + i * page_bytes, from + base + indices[static_cast<size_t>(i)] * page_bytes,
            static_cast<size_t>(page_bytes), cudaMemcpyDeviceToDevice, nullptr));
      }
    }
    kv_[0].swap(tokens);
    launch_dense(0, 0, point_.length, nullptr);
    std::vector<float> result = download_bf16(out_[0]->data(), q_elements_);
    kv_[0].swap(tokens);
    return result;
  }

  Shape shape_;
  Point point_;
  int64_t page_size_;
  kernels::PrefillVariant variant_;
  int64_t q_elements_ = 0, kv_elements_ = 0, num_pages_ = 0, num_copies_ = 0;
  std::vector<std::unique_ptr<DeviceMemory>> kv_, q_, out_;  // keys first, then values
  std::unique_ptr<DeviceMemory> qo_indptr_, kv_indptr_, indices_, lens_;
};

// Returns false when the result is wrong.
bool run_point(const Shape& shape, const Point& point, int64_t page_size, const Options& options,
               FILE* json) {
  PrefillProblem problem(shape, point, page_size, options.variant);
  const double error = problem.verify();
  if (!(error < 2e-2)) std::printf("WRONG: relative error %g\n", error);
  const Timing timing = problem.time();
  const double tflops = problem.flop() / timing.median_us / 1e6;
  std::printf("%3ld:%ld:%-5ld %4ldx%-6ld %4ld %10.2f %8.2f %8.1f\n", shape.num_q_heads,
              shape.num_kv_heads, shape.head_dim, point.num_requests, point.length, page_size,
              timing.median_us, timing.spread_us, tflops);
  std::fflush(stdout);
  if (json != nullptr) {
    std::fprintf(json,
                 "{\"bench\": \"attn_prefill_cuda\", %s, \"q_heads\": %ld, \"kv_heads\": %ld, "
                 "\"head_dim\": %ld, \"batch\": %ld, \"length\": %ld, \"page_size\": %ld, "
                 "\"median_us\": %.3f, \"iqr_us\": %.3f, \"tflop_per_s\": %.1f}\n",
                 run_facts().c_str(), shape.num_q_heads, shape.num_kv_heads, shape.head_dim,
                 point.num_requests, point.length, page_size, timing.median_us, timing.spread_us,
                 tflops);
  }
  return error < 2e-2;
}

int run(const Options& options) {
  FILE* json = open_results(options.json_path);
  std::printf("%-11s %10s %4s %10s %8s %8s\n", "shape", "BxL", "page", "us", "iqr", "TFLOP/s");
  int wrong = 0;
  for (size_t s = 0; s < std::size(kShapes); ++s) {
    for (size_t p = 0; p < std::size(kPoints); ++p) {
      if (options.only_shape >= 0 && options.only_shape != static_cast<int64_t>(s)) continue;
      if (options.only_point >= 0 && options.only_point != static_cast<int64_t>(p)) continue;
      if (options.quick && (s > 2 || kPoints[p].length > 8192)) continue;
      for (int64_t page_size : options.page_sizes) {
        wrong += run_point(kShapes[s], kPoints[p], page_size, options, json) ? 0 : 1;
      }
    }
  }
  if (json != nullptr) std::fclose(json);
  return wrong == 0 ? 0 : 1;
}

Options parse(int argc, char** argv) {
  Options options;
  for_each_argument(argc, argv, [&](const std::string& argument, const NextArgument& next) {
    if (argument == "--json") {
      options.json_path = next();
    } else if (argument == "--quick") {
      options.quick = true;
    } else if (argument == "--narrow") {
      options.variant = kernels::PrefillVariant::kNarrow;
    } else if (argument == "--split") {
      options.variant = kernels::PrefillVariant::kSplit;
    } else if (argument == "--wide") {
      options.variant = kernels::PrefillVariant::kWide;
    } else if (argument == "--page-size") {
      options.page_sizes.push_back(std::stoll(next()));
    } else if (argument == "--shape") {
      options.only_shape = std::stoll(next());
    } else if (argument == "--point") {
      options.only_point = std::stoll(next());
    } else {
      return false;
    }
    return true;
  });
  if (options.page_sizes.empty()) options.page_sizes = {0, 16};
  return options;
}

}  // namespace
}  // namespace astrai::bench

int main(int argc, char** argv) {
  return astrai::bench::report_errors("attn_prefill_cuda_bench", [&] {
    return astrai::bench::run(astrai::bench::parse(argc, argv));
  });
}
