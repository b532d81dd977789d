// Decode attention on one GPU: verifies each shape against the scalar kernel, then times it.
//
// --quick leaves out the last two shapes and the longest context, --large all points with less than
// 100 MB of keys and values, --sweep tries numbers of splits.
//
//   attn_cuda_bench [--json FILE] [--quick] [--large] [--sweep] [--dense] [--fixed KEYS]
//   [--max-cluster N] [--narrow | --wide]
//                   [--page-size N]...
//
// Cold cache: a CUDA graph of launches over several copies of the pages, together larger than L2.
// Times are medians over graph replays, in microseconds per launch, between device events; GB/s
// count each visible key and value once. The read bandwidth of the device is measured in the same
// run, over 4 GB, and so is what a kernel takes that only reads the bytes of the point, launched in
// the same way: short launches do not reach the bandwidth of long ones. One JSON line per point.
// benchmarks/python/attn_peers.py times other libraries on the same grid.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/cuda_check.h"
#include "common/cuda_device.h"
#include "cuda_bench_support.cuh"
#include "kernels/attention/attn_cuda_launch.h"
#include "kernels/attention/attn_launch.h"

namespace astrai::bench {
namespace {

struct Point {
  int64_t num_requests, context;
};
constexpr Point kPoints[] = {{1, 512},  {1, 4096},  {1, 32768}, {1, 131072}, {8, 512},
                             {8, 4096}, {8, 32768}, {64, 512},  {64, 4096},  {256, 1024}};

__global__ void read_kernel(const uint4* data, int64_t count, uint32_t* sink) {
  constexpr int kBatch = 8;
  uint32_t sum = 0;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  for (; i < count; i += kBatch * stride) {
    uint4 value[kBatch] = {};
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (i + j * stride < count) value[j] = __ldcs(data + i + j * stride);
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) sum ^= value[j].x ^ value[j].y ^ value[j].z ^ value[j].w;
  }
  if (sum == 0x12345678u) *sink = sum;  // never, but the compiler cannot know
}

void launch_read(const void* data, int64_t bytes, int blocks_per_sm, void* sink,
                 cudaStream_t stream) {
  const int64_t count = bytes / static_cast<int64_t>(sizeof(uint4));
  const int64_t full = int64_t{blocks_per_sm} * cuda_device(0).num_sms;
  const auto blocks = static_cast<unsigned>(std::min(full, (count + 8 * 256 - 1) / (8 * 256)));
  read_kernel<<<blocks, 256, 0, stream>>>(static_cast<const uint4*>(data), count,
                                          static_cast<uint32_t*>(sink));
  ASTRAI_CHECK_CUDA(cudaGetLastError());
}

double measure_read_gbps() {
  constexpr int64_t kBytes = int64_t{4} << 30;
  const DeviceMemory buffer(kBytes);
  const DeviceMemory sink(256);
  fill(buffer.data(), kBytes / 2, 7);
  double best = 0.0;
  for (int blocks_per_sm : {4, 8, 16}) {
    const Timing timing = time_graph({[&](cudaStream_t stream) {
      launch_read(buffer.data(), kBytes, blocks_per_sm, sink.data(), stream);
    }});
    best = std::max(best, kBytes / timing.median_us / 1e3);
  }
  return best;
}

struct Options {
  std::string json_path;
  bool quick = false;
  bool sweep = false;
  bool large = false;
  int64_t max_cluster = 0;
  kernels::DecodeVariant variant = kernels::DecodeVariant::kAuto;
  bool dense = false;
  int64_t fixed_split_keys = 0;
  std::vector<int64_t> page_sizes;
};

// One grid point: copies of the pages, shuffled page lists, a query and an output each.
class DecodeProblem {
 public:
  DecodeProblem(const Shape& shape, const Point& point, int64_t page_size, bool dense,
                kernels::DecodeVariant variant)
      : shape_(shape), point_(point), page_size_(page_size), dense_(dense), variant_(variant) {
    pages_each_ = (point.context + page_size - 1) / page_size;
    num_pages_ = pages_each_ * point.num_requests;
    kv_elements_ = num_pages_ * page_size * shape.num_kv_heads * shape.head_dim;
    num_copies_ = std::clamp<int64_t>(kColdBytes / (kv_elements_ * 4) + 1, 2, 16);
    // Keys and values of a copy in one allocation, keys first.
    for (int64_t c = 0; c < num_copies_; ++c) {
      kv_.push_back(std::make_unique<DeviceMemory>(kv_elements_ * 4));
      fill(kv_.back()->data(), kv_elements_ * 2, static_cast<uint32_t>(c + 1));
      q_.push_back(std::make_unique<DeviceMemory>(q_elements() * 2));
      fill(q_.back()->data(), q_elements(), static_cast<uint32_t>(c + 100));
      out_.push_back(std::make_unique<DeviceMemory>(q_elements() * 2));
    }
    std::vector<int32_t> indptr;
    for (int64_t b = 0; b <= point.num_requests; ++b) {
      indptr.push_back(static_cast<int32_t>(b * pages_each_));
    }
    const std::vector<int32_t> lens(static_cast<size_t>(point.num_requests),
                                    static_cast<int32_t>(point.context));
    indptr_ = upload(indptr);
    indices_ = upload(shuffled_indices(num_pages_));
    lens_ = upload(lens);
    o_part_ = std::make_unique<DeviceMemory>(point.num_requests * shape.num_q_heads * kMaxPartials *
                                             shape.head_dim * 4);
    ml_part_ =
        std::make_unique<DeviceMemory>(point.num_requests * shape.num_q_heads * kMaxPartials * 8);
  }

  int64_t kv_bytes() const {
    return point_.num_requests * point_.context * shape_.num_kv_heads * shape_.head_dim * 4;
  }

  void launch(int64_t copy, int64_t num_splits, int64_t fixed_split_keys, cudaStream_t stream) {
    const Device gpu{DeviceType::kCuda, 0};
    const int64_t b = point_.num_requests;
    const auto view = [&](void* data, DType dtype, std::initializer_list<int64_t> extents) {
      return TensorView::contiguous(data, dtype, extents, gpu);
    };
    auto* kv = static_cast<uint16_t*>(kv_[copy]->data());
    const TensorView o_part = view(o_part_->data(), DType::kFloat32,
                                   {b, shape_.num_q_heads, kMaxPartials, shape_.head_dim});
    const TensorView ml_part =
        view(ml_part_->data(), DType::kFloat32, {b, shape_.num_q_heads, kMaxPartials, 2});
    kernels::AttentionOptions options;
    options.num_splits = num_splits;
    options.fixed_split_keys = fixed_split_keys;
    options.max_kv_len = point_.context;
    options.stream = stream;
    options.o_part = &o_part;
    options.ml_part = &ml_part;
    if (dense_) {
      const auto dense_kv = [&](void* data) {
        return view(data, DType::kBFloat16,
                    {b, point_.context, shape_.num_kv_heads, shape_.head_dim});
      };
      const auto row = [&](void* data) {
        return view(data, DType::kBFloat16, {b, 1, shape_.num_q_heads, shape_.head_dim});
      };
      kernels::attn_decode(row(q_[copy]->data()), dense_kv(kv), dense_kv(kv + kv_elements_),
                           row(out_[copy]->data()), -1, options);
      return;
    }
    const auto pages = [&](void* data) {
      return view(data, DType::kBFloat16,
                  {num_pages_, page_size_, shape_.num_kv_heads, shape_.head_dim});
    };
    const auto row = [&](void* data) {
      return view(data, DType::kBFloat16, {b, shape_.num_q_heads, shape_.head_dim});
    };
    const TensorView k = pages(kv), v = pages(kv + kv_elements_);
    const TensorView indptr = view(indptr_->data(), DType::kInt32, {b + 1});
    const TensorView indices = view(indices_->data(), DType::kInt32, {num_pages_});
    const TensorView lens = view(lens_->data(), DType::kInt32, {b});
    kernels::attn_paged_decode(row(q_[copy]->data()), {k, v, indptr, indices, lens},
                               row(out_[copy]->data()), options);
  }

  // Largest difference from the scalar kernel, relative to the largest value.
  double verify(int64_t num_splits, int64_t fixed_split_keys) {
    kernels::force_decode_variant(kernels::DecodeVariant::kScalar);
    ASTRAI_CHECK_CUDA(cudaMemset(out_[0]->data(), 0xff, q_elements() * 2));
    launch(0, 1, 0, nullptr);
    const std::vector<float> expected = download_bf16(out_[0]->data(), q_elements());
    kernels::force_decode_variant(variant_);
    ASTRAI_CHECK_CUDA(cudaMemset(out_[0]->data(), 0xff, q_elements() * 2));
    launch(0, num_splits, fixed_split_keys, nullptr);
    const std::vector<float> found = download_bf16(out_[0]->data(), q_elements());
    return relative_error(found, expected);
  }

  Timing time(int64_t num_splits, int64_t fixed_split_keys) {
    std::vector<std::function<void(cudaStream_t)>> launches;
    for (int64_t c = 0; c < num_copies_; ++c) {
      launches.push_back(
          [=, this](cudaStream_t stream) { launch(c, num_splits, fixed_split_keys, stream); });
    }
    return time_graph(launches);
  }

  // What a kernel takes that only reads the same bytes, launched in the same way.
  double bare_read_us() {
    double best = INFINITY;
    for (int blocks_per_sm : {2, 4, 8}) {
      std::vector<std::function<void(cudaStream_t)>> launches;
      for (int64_t c = 0; c < num_copies_; ++c) {
        launches.push_back([=, this](cudaStream_t stream) {
          launch_read(kv_[c]->data(), kv_bytes(), blocks_per_sm, out_[c]->data(), stream);
        });
      }
      best = std::min(best, time_graph(launches).median_us);
    }
    return best;
  }

 private:
  static constexpr int64_t kMaxPartials = 512;

  int64_t q_elements() const { return point_.num_requests * shape_.num_q_heads * shape_.head_dim; }

  Shape shape_;
  Point point_;
  int64_t page_size_;
  bool dense_;
  kernels::DecodeVariant variant_;
  int64_t pages_each_ = 0, num_pages_ = 0, kv_elements_ = 0, num_copies_ = 0;
  std::vector<std::unique_ptr<DeviceMemory>> kv_, q_, out_;
  std::unique_ptr<DeviceMemory> indptr_, indices_, lens_, o_part_, ml_part_;
};

struct Row {
  Shape shape;
  Point point;
  int64_t page_size, num_splits;
  Timing timing;
  double gbps, bare_read_us;
};

void write_json(FILE* file, const Row& row, double read_gbps, const Options& options) {
  if (file == nullptr) return;
  std::fprintf(
      file,
      "{\"bench\": \"attn_decode_cuda\", %s, \"q_heads\": %ld, \"kv_heads\": %ld, "
      "\"head_dim\": %ld, \"batch\": %ld, \"context\": %ld, \"page_size\": %ld, \"num_splits\": "
      "%ld, "
      "\"fixed_split_keys\": %ld, \"median_us\": %.3f, \"iqr_us\": %.3f, \"gb_per_s\": %.1f, "
      "\"read_gb_per_s\": %.1f, \"bare_read_us\": %.3f}\n",
      run_facts().c_str(), row.shape.num_q_heads, row.shape.num_kv_heads, row.shape.head_dim,
      row.point.num_requests, row.point.context, row.page_size, row.num_splits,
      options.fixed_split_keys, row.timing.median_us, row.timing.spread_us, row.gbps, read_gbps,
      row.bare_read_us);
}

int run(const Options& options) {
  kernels::force_decode_max_cluster(options.max_cluster);
  cudaDeviceProp properties{};
  ASTRAI_CHECK_CUDA(cudaGetDeviceProperties(&properties, 0));
  const double read_gbps = measure_read_gbps();
  std::printf("%s, %d SMs, measured read %.0f GB/s\n", properties.name,
              properties.multiProcessorCount, read_gbps);
  FILE* json = open_results(options.json_path);
  std::printf("%-11s %10s %4s %6s %9s %7s %6s %5s %7s\n", "shape", "BxL", "page", "splits", "us",
              "iqr", "GB/s", "%read", "/bare");
  int wrong = 0;
  for (size_t s = 0; s < std::size(kShapes); ++s) {
    for (size_t p = 0; p < std::size(kPoints); ++p) {
      const Shape& shape = kShapes[s];
      const Point& point = kPoints[p];
      const int64_t kv_bytes =
          point.num_requests * point.context * shape.num_kv_heads * shape.head_dim * 4;
      if (options.large && kv_bytes < 100'000'000) continue;
      if (options.quick && (s > 2 || point.context > 32768)) continue;
      for (int64_t page_size : options.page_sizes) {
        DecodeProblem problem(shape, point, page_size, options.dense, options.variant);
        const double bare_read_us = problem.bare_read_us();
        std::vector<int64_t> all_splits{0};
        if (options.sweep) all_splits = {0, 1, 2, 3, 4, 6, 8, 16, 24, 32, 48, 64, 128};
        for (int64_t splits : all_splits) {
          if (splits * point.num_requests * shape.num_kv_heads > 4224 ||
              splits * 32 > point.context) {
            continue;
          }
          const double error = problem.verify(splits, options.fixed_split_keys);
          if (!(error < 2e-2)) {
            std::printf("WRONG: relative error %g at splits %ld\n", error, splits);
            ++wrong;
          }
          const Timing timing = problem.time(splits, options.fixed_split_keys);
          const Row row{shape,       point,  page_size,
                        splits,      timing, problem.kv_bytes() / timing.median_us / 1e3,
                        bare_read_us};
          std::printf("%3ld:%ld:%-5ld %4ldx%-6ld %4ld %6ld %9.2f %7.2f %6.0f %5.1f %7.2f\n",
                      shape.num_q_heads, shape.num_kv_heads, shape.head_dim, point.num_requests,
                      point.context, options.dense ? 0 : page_size, splits, timing.median_us,
                      timing.spread_us, row.gbps, 100 * row.gbps / read_gbps,
                      timing.median_us / bare_read_us);
          write_json(json, row, read_gbps, options);
        }
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
    } else if (argument == "--sweep") {
      options.sweep = true;
    } else if (argument == "--large") {
      options.large = true;
    } else if (argument == "--dense") {
      options.dense = true;
    } else if (argument == "--fixed") {
      options.fixed_split_keys = std::stoll(next());
    } else if (argument == "--max-cluster") {
      options.max_cluster = std::stoll(next());
    } else if (argument == "--narrow") {
      options.variant = kernels::DecodeVariant::kNarrow;
    } else if (argument == "--wide") {
      options.variant = kernels::DecodeVariant::kWide;
    } else if (argument == "--page-size") {
      options.page_sizes.push_back(std::stoll(next()));
    } else {
      return false;
    }
    return true;
  });
  if (options.page_sizes.empty()) options.page_sizes = {16};
  return options;
}

}  // namespace
}  // namespace astrai::bench

int main(int argc, char** argv) {
  return astrai::bench::report_errors(
      "attn_cuda_bench", [&] { return astrai::bench::run(astrai::bench::parse(argc, argv)); });
}
