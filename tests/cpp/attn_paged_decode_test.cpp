#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <stdexcept>

#include "kernels/attention/attn_dispatch.h"
#include "kernels/attention/attn_launch.h"
#include "support/attn_runner.h"
#include "support/expect_error.h"

namespace astrai::testing {
namespace {

AttnCase paged_case(std::vector<int64_t> kv_lens) {
  AttnCase test;
  test.op = AttnOp::kPagedDecode;
  test.num_q_heads = 9;
  test.num_kv_heads = 3;
  test.q_lens.assign(kv_lens.size(), 1);
  test.kv_lens = std::move(kv_lens);
  return test;
}

class AttnPagedDecodeGrid : public ::testing::TestWithParam<DType> {};

INSTANTIATE_TEST_SUITE_P(DTypes, AttnPagedDecodeGrid,
                         ::testing::Values(DType::kFloat32, DType::kFloat16, DType::kBFloat16),
                         [](const auto& info) { return std::string(dtype_name(info.param)); });

TEST_P(AttnPagedDecodeGrid, ShuffledPagesOfAnySizeAgreeWithTheDefinition) {
  uint64_t seed = 1;
  kernels::for_each_head_dim([&](int64_t head_dim) {
    for (int64_t page_size : {1, 3, 16, 64}) {
      for (int64_t heads : {1, 5, 7}) {
        AttnCase test = paged_case({0, 1, 64, 130, 17, 63});
        test.dtype = GetParam();
        test.head_dim = head_dim;
        test.num_q_heads = 2 * heads;
        test.num_kv_heads = 2;
        test.page_size = page_size;
        test.layout = static_cast<Layout>(seed % 3);
        test.seed = seed++;
        expect_exact(test);
      }
    }
  });
}

TEST_P(AttnPagedDecodeGrid, OptionsCompose) {
  uint64_t seed = 50;
  for (MaskKind mask : {MaskKind::kNone, MaskKind::kPerKey, MaskKind::kPerQuery}) {
    for (int64_t extra_keys : {-20, 0, 9}) {
      for (int64_t window : {-1, 1, 33}) {
        for (int64_t splits : {0, 2, 9}) {
          AttnCase test = paged_case({70, 5, 0, 128, 33});
          test.dtype = GetParam();
          test.page_size = splits == 2 ? 3 : 16;
          test.mask = mask;
          test.mask_extra_keys = extra_keys;
          test.window = window;
          test.num_splits = splits;
          test.partials = splits == 0 ? PartialsKind::kOwn : PartialsKind::kOversized;
          test.softcap = seed % 2 ? 1.5f : 0.0f;
          test.sinks = seed % 3 == 0;
          test.layout = static_cast<Layout>(seed % 3);
          test.seed = seed++;
          expect_exact(test);
        }
      }
    }
  }
}

TEST_P(AttnPagedDecodeGrid, LongAndShortRequestsShareABatch) {
  AttnCase test = paged_case({2000, 3, 700, 0, 1});
  test.dtype = GetParam();
  expect_exact(test);
}

// Unused slots of last pages, pages of nobody and of the neighbours, page ids after the last used
// one and everything around the tensors.
TEST(AttnPagedDecode, NothingPastTheLengthsIsRead) {
  for (int64_t length : {1, 15, 16, 17, 21, 63, 64, 65, 127, 129}) {
    for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      for (int64_t page_size : {1, 16, 64}) {
        AttnCase test = paged_case({length, length + 3, 1});
        test.dtype = dtype;
        test.num_q_heads = 16;
        test.num_kv_heads = 1;
        test.head_dim = 128;
        test.page_size = page_size;
        test.layout = static_cast<Layout>(length % 3);
        expect_poison_is_not_read(test);
      }
    }
  }
}

TEST(AttnPagedDecode, ARequestsBitsDoNotDependOnTheBatch) {
  AttnCase batch = paged_case({900, 1500, 30, 257, 256, 0});
  const AttnNumbers numbers = make_numbers(batch);
  const auto row = static_cast<size_t>(batch.num_q_heads * batch.head_dim);
  for (const TestTarget& target : test_targets()) {
    const AttnResult together = run_attention(target, batch, numbers);
    for (size_t b = 0; b < batch.kv_lens.size(); ++b) {
      const AttnCase alone = paged_case({batch.kv_lens[b]});
      AttnNumbers part = make_numbers(alone);
      const auto kv_row = static_cast<size_t>(alone.num_kv_heads * alone.head_dim);
      const auto first = static_cast<size_t>(numbers.kv_begin[b]) * kv_row;
      part.q.assign(numbers.q.begin() + static_cast<int64_t>(b * row),
                    numbers.q.begin() + static_cast<int64_t>((b + 1) * row));
      for (size_t i = 0; i < part.k.size(); ++i) {
        part.k[i] = numbers.k[first + i];
        part.v[i] = numbers.v[first + i];
      }
      const AttnResult single = run_attention(target, alone, part);
      for (size_t i = 0; i < row; ++i) ASSERT_EQ(single.out[i], together.out[b * row + i]);
    }
  }
}

TEST(AttnPagedDecode, TakesFourDimensionalQueries) {
  float q[4 * 64] = {}, kv[2 * 64] = {}, out[4 * 64];
  int32_t indptr[] = {0, 1}, indices[] = {0}, lens[] = {2};
  for (int i = 0; i < 128; ++i) kv[i] = static_cast<float>(i / 64);
  const auto pages = TensorView::contiguous(kv, DType::kFloat32, {1, 2, 1, 64});
  const auto view_indptr = TensorView::contiguous(indptr, DType::kInt32, {2});
  const auto view_indices = TensorView::contiguous(indices, DType::kInt32, {1});
  const auto view_lens = TensorView::contiguous(lens, DType::kInt32, {1});
  kernels::attn_paged_decode(TensorView::contiguous(q, DType::kFloat32, {1, 1, 4, 64}),
                             {pages, pages, view_indptr, view_indices, view_lens},
                             TensorView::contiguous(out, DType::kFloat32, {1, 1, 4, 64}), {});
  for (float value : out) EXPECT_FLOAT_EQ(value, 0.5f);
}

TEST(AttnPagedDecode, EmptyBatchLaunchesNothing) {
  for_each_result(paged_case({}), make_numbers(paged_case({})),
                  [](const AttnResult& result) { EXPECT_EQ(result.launches, 0); });
}

// ---- bad input --------------------

class AttnPagedDecodeErrors : public ::testing::Test {
 protected:
  static TensorView view(std::initializer_list<int64_t> shape, DType dtype = DType::kFloat32) {
    // Tensors of floats must not be touched: this address would fault.
    return TensorView::contiguous(reinterpret_cast<void*>(64), dtype, shape);
  }
  static TensorView numbers(std::vector<int32_t>& values) {
    return TensorView::contiguous(values.data(), DType::kInt32,
                                  {static_cast<int64_t>(values.size())});
  }

  void expect_refused(const std::string& text) {
    expect_error<std::invalid_argument>("attn_paged_decode: " + text, [&] { call(); });
  }

  void call() {
    const TensorView view_indptr = numbers(indptr);
    const TensorView view_indices = numbers(indices);
    const TensorView view_lens = numbers(lens);
    kernels::attn_paged_decode(q, {k, v, view_indptr, view_indices, view_lens}, out, options);
  }

  TensorView q = view({2, 6, 64});
  TensorView k = view({5, 16, 2, 64});
  TensorView v = view({5, 16, 2, 64});
  TensorView out = view({2, 6, 64});
  std::vector<int32_t> indptr{0, 2, 3};
  std::vector<int32_t> indices{4, 0, 2};
  std::vector<int32_t> lens{20, 16};
  kernels::AttentionOptions options;
};

TEST_F(AttnPagedDecodeErrors, PageIds) {
  indices[1] = 5;
  expect_refused("kv_indices[1] is 5; expected a page id below 5");
  indices[1] = -1;
  expect_refused("kv_indices[1] is -1; expected a page id below 5");
}

TEST_F(AttnPagedDecodeErrors, Lengths) {
  lens[1] = -3;
  expect_refused("kv_lens[1] is -3; expected 0 to 16, what the 1 pages of the request hold");
  lens[1] = 17;
  expect_refused("kv_lens[1] is 17; expected 0 to 16, what the 1 pages of the request hold");
}

TEST_F(AttnPagedDecodeErrors, PageListOffsets) {
  indptr = {0, 2, 4};
  expect_refused(
      "kv_indptr[1] is 2 and kv_indptr[2] is 4; expected rising offsets from 0 to at most the 3 "
      "entries of kv_indices");
  indptr = {0, 3, 2};
  expect_refused(
      "kv_indptr[1] is 3 and kv_indptr[2] is 2; expected rising offsets from 0 to at most the 3 "
      "entries of kv_indices");
  indptr = {-1, 2, 3};
  expect_refused(
      "kv_indptr[0] is -1 and kv_indptr[1] is 2; expected rising offsets from 0 to at most the 3 "
      "entries of kv_indices");
}

TEST_F(AttnPagedDecodeErrors, MetadataShapes) {
  indptr = {0, 2};
  expect_refused("kv_indptr has shape [2]; expected [3]");
  lens = {20};
  expect_refused("kv_lens has shape [1]; expected [2]");
}

TEST_F(AttnPagedDecodeErrors, MetadataTypes) {
  std::vector<int64_t> wide{20, 16};
  const TensorView view_indptr = numbers(indptr);
  const TensorView view_indices = numbers(indices);
  TensorView view_lens = TensorView::contiguous(wide.data(), DType::kInt64, {2});
  const kernels::PagedKv kv{k, v, view_indptr, view_indices, view_lens};
  expect_error<std::invalid_argument>("attn_paged_decode: kv_lens has dtype int64; expected int32",
                                      [&] { kernels::attn_paged_decode(q, kv, out, options); });
  view_lens = numbers(lens);
  view_lens.strides[0] = 2;
  expect_error<std::invalid_argument>(
      "attn_paged_decode: kv_lens of shape [2] is not contiguous; expected a contiguous tensor",
      [&] { kernels::attn_paged_decode(q, kv, out, options); });
  view_lens.strides[0] = 1;
  view_lens.device = {DeviceType::kCuda, 0};
  expect_error<std::invalid_argument>(
      "attn_paged_decode: kv_lens is on cuda:0; expected cpu, as q is",
      [&] { kernels::attn_paged_decode(q, kv, out, options); });
}

TEST_F(AttnPagedDecodeErrors, Pages) {
  k = v = view({5, 16, 2, 96});
  expect_refused("k_pages has head_dim 96; expected 64, as q has");
  k = v = view({5, 0, 2, 64});
  expect_refused("k_pages has page_size 0; expected at least 1");
  k = view({5, 16, 2, 64});
  v = view({5, 8, 2, 64});
  expect_refused("v_pages has page_size 8; expected 16, as k_pages has");
  v = view({4, 16, 2, 64});
  expect_refused("v_pages has page count 4; expected 5, as k_pages has");
}

TEST_F(AttnPagedDecodeErrors, QueryShape) {
  q = out = view({2, 2, 6, 64});
  expect_refused(
      "q has shape [2, 2, 6, 64]; expected [batch, q_heads, head_dim] or [batch, 1, q_heads, "
      "head_dim]");
}

TEST_F(AttnPagedDecodeErrors, Masks) {
  TensorView mask = view({3, 20}, DType::kBool);
  options.mask = &mask;
  expect_refused("mask has shape [3, 20]; expected [2, keys] or [2, 1, keys]");
}

#if !ASTRAI_WITH_CUDA  // elsewhere these addresses would reach a kernel
TEST_F(AttnPagedDecodeErrors, CudaContentsAreNotReadOnTheHost) {
  const Device cuda{DeviceType::kCuda, 0};
  for (TensorView* tensor : {&q, &k, &v, &out}) tensor->device = cuda;
  const auto nowhere = [&](int64_t length) {
    TensorView result = view({length}, DType::kInt32);
    result.device = cuda;
    return result;
  };
  const TensorView view_indptr = nowhere(3), view_indices = nowhere(3), view_lens = nowhere(2);
  EXPECT_THROW(
      kernels::attn_paged_decode(q, {k, v, view_indptr, view_indices, view_lens}, out, options),
      std::runtime_error);
}
#endif

}  // namespace
}  // namespace astrai::testing
