// What only the CUDA decode kernels promise: graphs that hold for other lengths, results that do
// not depend on the batch, no allocation, errors that name the device. The numbers themselves are
// compared in attn_decode_test and attn_paged_decode_test.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "common/counters.h"
#include "common/device.h"
#include "kernels/attention/attn_launch.h"
#include "support/test_random.h"
#include "support/test_target.h"
#include "support/test_tensor.h"

#if ASTRAI_WITH_CUDA
#include "common/cuda_device.h"
#endif

namespace astrai::testing {
namespace {

TEST(GpuPresence, KernelTestsRunOnAGpu) {
  const std::string missing = missing_gpu();
  if (missing.empty()) return;
  if (gpu_is_required()) FAIL() << missing << "; ASTRAI_REQUIRE_GPU=1 expects one";
  GTEST_SKIP() << missing << "; the kernel tests ran on the CPU only";
}

#if ASTRAI_WITH_CUDA

constexpr Device kGpu{DeviceType::kCuda, 0};

// A batch of requests over a shared pool of pages, with room for `capacity` keys each.
class PagedBatch {
 public:
  PagedBatch(int64_t num_requests, int64_t capacity, int64_t num_q_heads, int64_t num_kv_heads,
             int64_t head_dim, int64_t page_size)
      : pages_each_((capacity + page_size - 1) / page_size),
        num_requests_(num_requests),
        q(kGpu, DType::kBFloat16, {num_requests, num_q_heads, head_dim}, Poison::kNan),
        out(kGpu, DType::kBFloat16, {num_requests, num_q_heads, head_dim}, Poison::kNan),
        lse(kGpu, DType::kFloat32, {num_requests, num_q_heads}, Poison::kNan),
        k(kGpu, DType::kBFloat16, {num_requests * pages_each_, page_size, num_kv_heads, head_dim},
          Poison::kNan),
        v(kGpu, DType::kBFloat16, {num_requests * pages_each_, page_size, num_kv_heads, head_dim},
          Poison::kNan),
        indptr(kGpu, DType::kInt32, {num_requests + 1}, Poison::kNan),
        indices(kGpu, DType::kInt32, {num_requests * pages_each_}, Poison::kNan),
        lens(kGpu, DType::kInt32, {num_requests}, Poison::kNan) {
    Random random(test_seed());
    fill(q, num_requests, 1, num_q_heads, head_dim, random);
    fill_pages(k, num_kv_heads, head_dim, page_size, random);
    fill_pages(v, num_kv_heads, head_dim, page_size, random);
    for (int64_t b = 0; b <= num_requests; ++b) indptr.set({b}, double(b * pages_each_));
    std::vector<int64_t> order(static_cast<size_t>(num_requests * pages_each_));
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
    random.shuffle(order);
    for (size_t i = 0; i < order.size(); ++i) {
      indices.set({static_cast<int64_t>(i)}, double(order[i]));
    }
    for (int64_t b = 0; b < num_requests; ++b) lens.set({b}, 0);
    q_view = q.upload();
    out_view = out.upload();
    lse_view = lse.upload();
    k_view = k.upload();
    v_view = v.upload();
    indptr_view = indptr.upload();
    indices_view = indices.upload();
    lens_view = lens.upload();
  }

  void set_lens(const std::vector<int32_t>& values) {
    ASSERT_EQ(static_cast<int64_t>(values.size()), num_requests_);
    ASTRAI_CHECK_CUDA(cudaMemcpy(lens_view.data, values.data(), values.size() * sizeof(int32_t),
                                 cudaMemcpyHostToDevice));
  }

  // Requests [first, first + count) alone.
  void decode(kernels::AttentionOptions options, int64_t first = 0, int64_t count = -1) {
    if (count < 0) count = num_requests_;
    const auto rows = [&](const TensorView& view, int64_t extent) {
      TensorView part = view;
      part.shape[0] = extent;
      part.data =
          static_cast<uint8_t*>(view.data) + first * view.strides[0] * dtype_bytes(view.dtype);
      return part;
    };
    const TensorView some_q = rows(q_view, count);
    const TensorView some_out = rows(out_view, count);
    const TensorView some_lse = rows(lse_view, count);
    const TensorView some_indptr = rows(indptr_view, count + 1);
    const TensorView some_lens = rows(lens_view, count);
    options.lse = &some_lse;
    kernels::attn_paged_decode(some_q, {k_view, v_view, some_indptr, indices_view, some_lens},
                               some_out, options);
  }

  std::vector<uint8_t> result() {
    ASTRAI_CHECK_CUDA(cudaDeviceSynchronize());
    out.download();
    lse.download();
    std::vector<uint8_t> bytes = out.element_bytes();
    const std::vector<uint8_t> more = lse.element_bytes();
    bytes.insert(bytes.end(), more.begin(), more.end());
    return bytes;
  }

  std::vector<uint8_t> out_row(int64_t b) {
    ASTRAI_CHECK_CUDA(cudaDeviceSynchronize());
    out.download();
    const std::vector<uint8_t> bytes = out.element_bytes();
    const auto size = static_cast<int64_t>(bytes.size()) / num_requests_;
    return {bytes.begin() + b * size, bytes.begin() + (b + 1) * size};
  }

 private:
  static void fill(TestTensor& tensor, int64_t outer, int64_t, int64_t heads, int64_t dim,
                   Random& random) {
    for (int64_t i = 0; i < outer * heads * dim; ++i) {
      tensor.set({i / (heads * dim), i / dim % heads, i % dim}, random.normal());
    }
  }
  void fill_pages(TestTensor& tensor, int64_t heads, int64_t dim, int64_t page_size,
                  Random& random) {
    const int64_t row = heads * dim;
    for (int64_t i = 0; i < num_requests_ * pages_each_ * page_size * row; ++i) {
      tensor.set({i / (row * page_size), i / row % page_size, i / dim % heads, i % dim},
                 random.normal());
    }
  }

  int64_t pages_each_;
  int64_t num_requests_;

 public:
  TestTensor q, out, lse, k, v, indptr, indices, lens;
  TensorView q_view, out_view, lse_view, k_view, v_view, indptr_view, indices_view, lens_view;
};

class AttnDecodeCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string missing = missing_gpu();
    if (missing.empty()) return;
    if (gpu_is_required()) FAIL() << missing << "; ASTRAI_REQUIRE_GPU=1 expects one";
    GTEST_SKIP() << missing;
  }
};

// Lengths of a batch of five in successive steps; the last row is a filler in some.
const std::vector<std::vector<int32_t>> kSteps = {
    {1, 200, 33, 640, 0}, {2, 201, 34, 1, 0}, {640, 640, 640, 640, 640}, {17, 0, 0, 300, 64}};

void expect_replay_equals_eager(PagedBatch& batch, kernels::AttentionOptions options) {
  cudaStream_t stream = nullptr;
  ASTRAI_CHECK_CUDA(cudaStreamCreate(&stream));
  options.stream = stream;
  batch.set_lens(kSteps[0]);
  batch.decode(options);  // prepares the kernels
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ASTRAI_CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  batch.decode(options);
  ASTRAI_CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  ASTRAI_CHECK_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  for (const std::vector<int32_t>& lens : kSteps) {
    ASTRAI_CHECK_CUDA(cudaDeviceSynchronize());
    batch.set_lens(lens);
    batch.decode(options);
    const std::vector<uint8_t> eager = batch.result();
    ASTRAI_CHECK_CUDA(cudaMemset(batch.out_view.data, 0xff, 5 * batch.out_view.strides[0] * 2));
    ASTRAI_CHECK_CUDA(cudaGraphLaunch(executable, stream));
    EXPECT_EQ(batch.result(), eager);
  }
  ASTRAI_CHECK_CUDA(cudaGraphExecDestroy(executable));
  ASTRAI_CHECK_CUDA(cudaGraphDestroy(graph));
  ASTRAI_CHECK_CUDA(cudaStreamDestroy(stream));
}

TEST_F(AttnDecodeCuda, AGraphHoldsForOtherLengths) {
  PagedBatch batch(5, 640, 24, 4, 64, 16);
  for (int64_t splits : {0, 1, 8, 7, 32}) {
    kernels::AttentionOptions options;
    options.num_splits = splits;
    SCOPED_TRACE(splits);
    expect_replay_equals_eager(batch, options);
  }
}

TEST_F(AttnDecodeCuda, GivenPartialsMeanNoAllocation) {
  PagedBatch batch(5, 640, 24, 4, 64, 16);
  batch.set_lens(kSteps[2]);
  TestTensor o_part(kGpu, DType::kFloat32, {5, 24, 7, 64}, Poison::kNan);
  TestTensor ml_part(kGpu, DType::kFloat32, {5, 24, 7, 2}, Poison::kNan);
  const TensorView o_view = o_part.upload();
  const TensorView ml_view = ml_part.upload();
  kernels::AttentionOptions options;
  options.num_splits = 7;
  batch.decode(options);
  const std::vector<uint8_t> own = batch.result();
  options.o_part = &o_view;
  options.ml_part = &ml_view;
  const int64_t before = counters().device_allocations;
  batch.decode(options);
  EXPECT_EQ(counters().device_allocations, before);
  EXPECT_EQ(batch.result(), own);
}

TEST_F(AttnDecodeCuda, FixedSplitsDoNotDependOnTheBatch) {
  for (int64_t head_dim : {64, 128, 256}) {
    for (int64_t split_keys : {128, 256}) {
      PagedBatch batch(5, 2000, 8, 2, head_dim, 16);
      batch.set_lens({1, 2000, 128, 640, 1999});
      kernels::AttentionOptions options;
      options.fixed_split_keys = split_keys;
      batch.decode(options);
      std::vector<std::vector<uint8_t>> together;
      for (int64_t b = 0; b < 5; ++b) together.push_back(batch.out_row(b));
      // Alone, the bound that the plan sees is smaller, and so is the grid.
      for (int64_t b = 0; b < 5; ++b) {
        ASTRAI_CHECK_CUDA(cudaMemset(batch.out_view.data, 0xff, 5 * batch.out_view.strides[0] * 2));
        batch.decode(options, b, 1);
        EXPECT_EQ(batch.out_row(b), together[static_cast<size_t>(b)])
            << "request " << b << ", head_dim " << head_dim << ", splits of " << split_keys;
      }
      // One cluster or several: the same bits, with the other requests made short.
      TensorView whole = batch.indices_view;
      batch.set_lens({1, 2000, 0, 0, 0});
      batch.indices_view.shape[0] = 2 * ((2000 + 15) / 16);
      batch.decode(options, 0, 2);
      EXPECT_EQ(batch.out_row(1), together[1]);
      batch.indices_view = whole;
    }
  }
}

TEST_F(AttnDecodeCuda, ShortRowsAreTheSameWhetherCombinedOrNot) {
  PagedBatch batch(1, 4000, 8, 2, 128, 16);
  batch.set_lens({300});
  kernels::AttentionOptions options;
  options.fixed_split_keys = 128;
  batch.decode(options);  // room for 4000 keys: several partials
  const std::vector<uint8_t> combined = batch.out_row(0);
  batch.indices_view.shape[0] = 20;  // room for 320 keys: one cluster
  batch.decode(options);
  EXPECT_EQ(batch.out_row(0), combined);
}

// The shapes of the tensor-core kernel, which the launcher chooses by batch size, agree closely on
// batches of any size.
TEST_F(AttnDecodeCuda, BothShapesServeEveryBatch) {
  for (int64_t head_dim : {32, 64, 80, 96, 128, 256}) {
    PagedBatch batch(5, 640, 14, 2, head_dim, 16);
    batch.set_lens({1, 200, 33, 640, 0});
    for (int64_t splits : {0, 1, 4, 7}) {
      kernels::AttentionOptions options;
      options.num_splits = splits;
      std::vector<std::vector<double>> results;
      for (auto variant : {kernels::DecodeVariant::kScalar, kernels::DecodeVariant::kNarrow,
                           kernels::DecodeVariant::kWide}) {
        kernels::force_decode_variant(variant);
        ASTRAI_CHECK_CUDA(cudaMemset(batch.out_view.data, 0xff, 5 * batch.out_view.strides[0] * 2));
        batch.decode(options);
        batch.result();
        std::vector<double> values;
        for (int64_t i = 0; i < 5 * 14 * head_dim; ++i) {
          values.push_back(batch.out.get({i / (14 * head_dim), i / head_dim % 14, i % head_dim}));
        }
        results.push_back(values);
      }
      kernels::force_decode_variant(kernels::DecodeVariant::kAuto);
      for (size_t i = 0; i < results[0].size(); ++i) {
        ASSERT_NEAR(results[1][i], results[0][i], 2e-2) << "narrow, D " << head_dim << " at " << i;
        ASSERT_NEAR(results[2][i], results[0][i], 2e-2) << "wide, D " << head_dim << " at " << i;
      }
    }
  }
}

TEST_F(AttnDecodeCuda, AnErrorNamesTheKernel) {
  const KernelConfig impossible{.function = nullptr, .name = "some_kernel", .threads = 32};
  try {
    launch_kernel(impossible, {.x = 1}, nullptr, 0, nullptr);
    FAIL() << "nothing was thrown";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("some_kernel"), std::string::npos) << error.what();
  }
}

#endif

}  // namespace
}  // namespace astrai::testing
