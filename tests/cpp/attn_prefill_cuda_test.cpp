// What only the CUDA prefill kernels promise: graphs that hold for other lengths, no allocation,
// the same bits from the shapes of the tensor-core kernel that do not divide a row's keys. The
// numbers themselves are compared in attn_prefill_test and attn_paged_prefill_test.
#include <gtest/gtest.h>

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

#if ASTRAI_WITH_CUDA

constexpr Device kGpu{DeviceType::kCuda, 0};

void fill_normal(TestTensor& tensor, int64_t rows, int64_t heads, int64_t dim, Random& random) {
  for (int64_t i = 0; i < rows * heads * dim; ++i) {
    tensor.set({i / (heads * dim), i / dim % heads, i % dim}, random.normal());
  }
}

// A ragged batch of kRequests over a pool of single-token pages, with room for `capacity` keys each
// and num_rows queries together.
class RaggedBatch {
 public:
  static constexpr int64_t kRequests = 5;
  static constexpr int64_t kQHeads = 12;
  static constexpr int64_t kKvHeads = 2;

  RaggedBatch(DType dtype, int64_t num_rows, int64_t capacity, int64_t head_dim)
      : q_(kGpu, dtype, {num_rows, kQHeads, head_dim}, Poison::kNan),
        out_(kGpu, dtype, {num_rows, kQHeads, head_dim}, Poison::kNan),
        lse_(kGpu, DType::kFloat32, {num_rows, kQHeads}, Poison::kNan),
        k_(kGpu, dtype, {kRequests * capacity, kKvHeads, head_dim}, Poison::kNan),
        v_(kGpu, dtype, {kRequests * capacity, kKvHeads, head_dim}, Poison::kNan),
        qo_indptr_(kGpu, DType::kInt32, {kRequests + 1}, Poison::kNan),
        kv_indptr_(kGpu, DType::kInt32, {kRequests + 1}, Poison::kNan),
        indices_(kGpu, DType::kInt32, {kRequests * capacity}, Poison::kNan),
        lens_(kGpu, DType::kInt32, {kRequests}, Poison::kNan) {
    Random random(test_seed());
    fill_normal(q_, num_rows, kQHeads, head_dim, random);
    fill_normal(k_, kRequests * capacity, kKvHeads, head_dim, random);
    fill_normal(v_, kRequests * capacity, kKvHeads, head_dim, random);
    std::vector<int64_t> order(static_cast<size_t>(kRequests * capacity));
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
    random.shuffle(order);
    for (size_t i = 0; i < order.size(); ++i) {
      indices_.set({static_cast<int64_t>(i)}, static_cast<double>(order[i]));
    }
    for (int64_t b = 0; b <= kRequests; ++b) {
      kv_indptr_.set({b}, static_cast<double>(b * capacity));
    }
    q_view_ = q_.upload();
    out_view_ = out_.upload();
    lse_view_ = lse_.upload();
    k_view_ = pages(k_.upload());
    v_view_ = pages(v_.upload());
    qo_indptr_view_ = qo_indptr_.upload();
    kv_indptr_view_ = kv_indptr_.upload();
    indices_view_ = indices_.upload();
    lens_view_ = lens_.upload();
  }

  void set_lens(const std::vector<int32_t>& q_lens, const std::vector<int32_t>& kv_lens) {
    std::vector<int32_t> indptr{0};
    for (int32_t q_len : q_lens) indptr.push_back(indptr.back() + q_len);
    ASSERT_EQ(indptr.back(), q_view_.shape[0]);
    ASTRAI_CHECK_CUDA(
        cudaMemcpy(qo_indptr_view_.data, indptr.data(), indptr.size() * 4, cudaMemcpyHostToDevice));
    ASTRAI_CHECK_CUDA(
        cudaMemcpy(lens_view_.data, kv_lens.data(), kv_lens.size() * 4, cudaMemcpyHostToDevice));
  }

  void prefill(kernels::AttentionOptions options) {
    options.lse = &lse_view_;
    kernels::attn_paged_prefill(q_view_,
                                {k_view_, v_view_, kv_indptr_view_, indices_view_, lens_view_},
                                qo_indptr_view_, out_view_, {}, options);
  }

  void poison_result() {
    ASTRAI_CHECK_CUDA(
        cudaMemset(out_view_.data, 0xff,
                   static_cast<size_t>(out_view_.numel() * dtype_bytes(out_view_.dtype))));
    ASTRAI_CHECK_CUDA(cudaMemset(lse_view_.data, 0xff, static_cast<size_t>(lse_view_.numel() * 4)));
  }

  // Output and LSE, bit for bit.
  std::vector<uint8_t> result() {
    ASTRAI_CHECK_CUDA(cudaDeviceSynchronize());
    out_.download();
    lse_.download();
    std::vector<uint8_t> bytes = out_.element_bytes();
    const std::vector<uint8_t> more = lse_.element_bytes();
    bytes.insert(bytes.end(), more.begin(), more.end());
    return bytes;
  }

 private:
  // [P, Hkv, D] as pages of one token.
  static TensorView pages(const TensorView& view) {
    TensorView result = view;
    result.ndim = 4;
    result.shape[0] = view.shape[0];
    result.shape[1] = 1;
    result.strides[1] = view.strides[0];
    for (int i : {1, 2}) {
      result.shape[i + 1] = view.shape[i];
      result.strides[i + 1] = view.strides[i];
    }
    return result;
  }

  TestTensor q_, out_, lse_, k_, v_, qo_indptr_, kv_indptr_, indices_, lens_;
  TensorView q_view_, out_view_, lse_view_, k_view_, v_view_;
  TensorView qo_indptr_view_, kv_indptr_view_, indices_view_, lens_view_;
};

struct Step {
  std::vector<int32_t> q_lens;  // 150 rows together
  std::vector<int32_t> kv_lens;
};
const std::vector<Step> kSteps = {{{150, 0, 0, 0, 0}, {150, 0, 7, 0, 0}},
                                  {{1, 1, 1, 1, 146}, {300, 2, 41, 0, 146}},
                                  {{30, 30, 30, 30, 30}, {300, 200, 100, 30, 20}},
                                  {{0, 0, 149, 1, 0}, {5, 0, 290, 300, 0}}};

class AttnPrefillCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string missing = missing_gpu();
    if (missing.empty()) return;
    if (gpu_is_required()) FAIL() << missing << "; ASTRAI_REQUIRE_GPU=1 expects one";
    GTEST_SKIP() << missing;
  }
  void TearDown() override { kernels::force_prefill_variant(kernels::PrefillVariant::kAuto); }
};

void expect_replay_equals_eager(RaggedBatch& batch, kernels::AttentionOptions options) {
  cudaStream_t stream = nullptr;
  ASTRAI_CHECK_CUDA(cudaStreamCreate(&stream));
  options.stream = stream;
  batch.set_lens(kSteps[0].q_lens, kSteps[0].kv_lens);
  batch.prefill(options);  // prepares the kernel
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ASTRAI_CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  batch.prefill(options);
  ASTRAI_CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  ASTRAI_CHECK_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  for (const Step& step : kSteps) {
    ASTRAI_CHECK_CUDA(cudaDeviceSynchronize());
    batch.set_lens(step.q_lens, step.kv_lens);
    batch.poison_result();
    batch.prefill(options);
    const std::vector<uint8_t> eager = batch.result();
    batch.poison_result();
    ASTRAI_CHECK_CUDA(cudaDeviceSynchronize());
    ASTRAI_CHECK_CUDA(cudaGraphLaunch(executable, stream));
    EXPECT_EQ(batch.result(), eager);
  }
  ASTRAI_CHECK_CUDA(cudaGraphExecDestroy(executable));
  ASTRAI_CHECK_CUDA(cudaGraphDestroy(graph));
  ASTRAI_CHECK_CUDA(cudaStreamDestroy(stream));
}

TEST_F(AttnPrefillCuda, AGraphHoldsForOtherLengths) {
  for (DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (auto variant : {kernels::PrefillVariant::kNarrow, kernels::PrefillVariant::kSplit,
                         kernels::PrefillVariant::kWide}) {
      kernels::force_prefill_variant(variant);
      RaggedBatch batch(dtype, 150, 300, 64);
      kernels::AttentionOptions options;
      expect_replay_equals_eager(batch, options);
      options.window = 70;
      options.softcap = 3.0f;
      expect_replay_equals_eager(batch, options);
    }
  }
}

TEST_F(AttnPrefillCuda, NothingIsAllocatedAndOneKernelRuns) {
  RaggedBatch batch(DType::kBFloat16, 150, 300, 64);
  batch.set_lens(kSteps[1].q_lens, kSteps[1].kv_lens);
  batch.prefill({});
  const int64_t allocations = counters().device_allocations;
  const int64_t launches = counters().launches;
  batch.prefill({});
  EXPECT_EQ(counters().device_allocations, allocations);
  EXPECT_EQ(counters().launches, launches + 1);
}

// Which of these shapes serves a batch depends on its size; what a row gets must not.
TEST_F(AttnPrefillCuda, NarrowAndWideGiveTheSameBits) {
  for (DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (int64_t head_dim : {32, 64, 80, 96, 128, 256}) {
      RaggedBatch batch(dtype, 150, 300, head_dim);
      for (const Step& step : kSteps) {
        std::vector<std::vector<uint8_t>> results;
        for (auto variant : {kernels::PrefillVariant::kNarrow, kernels::PrefillVariant::kWide}) {
          kernels::force_prefill_variant(variant);
          batch.set_lens(step.q_lens, step.kv_lens);
          batch.poison_result();
          batch.prefill({});
          results.push_back(batch.result());
        }
        EXPECT_EQ(results[0], results[1]) << dtype_name(dtype) << ", head_dim " << head_dim;
      }
    }
  }
}

// num_splits 1: a row's bits do not depend on how much of the device the batch fills.
TEST_F(AttnPrefillCuda, WithoutSplitsTheLaunchersChoiceGivesTheNarrowShapesBits) {
  for (int64_t head_dim : {64, 128, 256}) {
    RaggedBatch batch(DType::kBFloat16, 150, 300, head_dim);
    batch.set_lens(kSteps[2].q_lens, kSteps[2].kv_lens);
    const auto bits = [&](kernels::PrefillVariant variant, int64_t num_splits) {
      kernels::force_prefill_variant(variant);
      batch.poison_result();
      kernels::AttentionOptions options;
      options.num_splits = num_splits;
      batch.prefill(options);
      return batch.result();
    };
    const auto narrow = bits(kernels::PrefillVariant::kNarrow, 0);
    EXPECT_EQ(bits(kernels::PrefillVariant::kAuto, 1), narrow) << "head_dim " << head_dim;
    // A batch of this size is split otherwise: the comparison above would not notice if it were.
    EXPECT_EQ(bits(kernels::PrefillVariant::kAuto, 0), bits(kernels::PrefillVariant::kSplit, 0));
    EXPECT_NE(bits(kernels::PrefillVariant::kSplit, 0), narrow) << "head_dim " << head_dim;
  }
}

// More requests than a warp has lanes, in every order of lengths.
TEST_F(AttnPrefillCuda, ManyRequestsFindTheirTiles) {
  constexpr int64_t kRequests = 77;
  constexpr int64_t kDim = 32;
  Random random(test_seed());
  std::vector<int32_t> indptr{0}, lens;
  for (int64_t b = 0; b < kRequests; ++b) {
    lens.push_back(static_cast<int32_t>(b * 37 % 11 * (b % 5 == 0 ? 20 : 1)));
    indptr.push_back(indptr.back() + lens.back());
  }
  const int64_t rows = indptr.back();
  const auto normal = [&](TestTensor& tensor) { fill_normal(tensor, rows, 1, kDim, random); };
  TestTensor q(kGpu, DType::kBFloat16, {rows, 1, kDim}, Poison::kNan);
  TestTensor k(kGpu, DType::kBFloat16, {rows, 1, kDim}, Poison::kNan);
  TestTensor v(kGpu, DType::kBFloat16, {rows, 1, kDim}, Poison::kNan);
  normal(q);
  normal(k);
  for (int64_t b = 0; b < kRequests; ++b) {  // every value names its request
    for (int64_t row = indptr[static_cast<size_t>(b)]; row < indptr[static_cast<size_t>(b) + 1];
         ++row) {
      for (int64_t d = 0; d < kDim; ++d) v.set({row, 0, d}, static_cast<double>(b));
    }
  }
  std::vector<TestTensor> numbers;
  const auto upload = [&](const std::vector<int32_t>& values) {
    TestTensor tensor(kGpu, DType::kInt32, {static_cast<int64_t>(values.size())}, Poison::kNan);
    for (size_t i = 0; i < values.size(); ++i) tensor.set({static_cast<int64_t>(i)}, values[i]);
    numbers.push_back(tensor);
    return numbers.back().upload();
  };
  std::vector<int32_t> indices;
  for (int32_t i = 0; i < rows; ++i) indices.push_back(i);
  numbers.reserve(3);
  const TensorView indptr_view = upload(indptr);
  const TensorView indices_view = upload(indices);
  const TensorView lens_view = upload(lens);
  const TensorView q_view = q.upload();
  const auto pages = [](TensorView view) {
    view.ndim = 4;
    view.shape = {view.shape[0], 1, 1, kDim};
    view.strides = {kDim, kDim, kDim, 1};
    return view;
  };
  const TensorView k_view = pages(k.upload());
  const TensorView v_view = pages(v.upload());
  for (auto variant : {kernels::PrefillVariant::kScalar, kernels::PrefillVariant::kNarrow,
                       kernels::PrefillVariant::kSplit, kernels::PrefillVariant::kWide}) {
    kernels::force_prefill_variant(variant);
    TestTensor out(kGpu, DType::kBFloat16, {rows, 1, kDim}, Poison::kNan);
    const TensorView out_view = out.upload();
    kernels::attn_paged_prefill(q_view, {k_view, v_view, indptr_view, indices_view, lens_view},
                                indptr_view, out_view, {}, {});
    ASTRAI_CHECK_CUDA(cudaDeviceSynchronize());
    out.download();
    for (int64_t b = 0; b < kRequests; ++b) {
      for (int64_t row = indptr[static_cast<size_t>(b)]; row < indptr[static_cast<size_t>(b) + 1];
           ++row) {
        for (int64_t d = 0; d < kDim; ++d) {
          ASSERT_NEAR(out.get({row, 0, d}), static_cast<double>(b), 0.01 * static_cast<double>(b))
              << "request " << b << " row " << row;
        }
      }
    }
  }
}

#endif

}  // namespace
}  // namespace astrai::testing
