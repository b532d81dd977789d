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

constexpr double kInf = std::numeric_limits<double>::infinity();

AttnCase ragged_case(std::vector<int64_t> q_lens, std::vector<int64_t> kv_lens) {
  AttnCase test;
  test.op = AttnOp::kPagedPrefill;
  test.num_q_heads = 9;
  test.num_kv_heads = 3;
  test.causal = CausalKind::kFromLengths;
  test.q_lens = std::move(q_lens);
  test.kv_lens = std::move(kv_lens);
  return test;
}

class AttnPagedPrefillGrid : public ::testing::TestWithParam<DType> {};

INSTANTIATE_TEST_SUITE_P(DTypes, AttnPagedPrefillGrid,
                         ::testing::Values(DType::kFloat32, DType::kFloat16, DType::kBFloat16),
                         [](const auto& info) { return std::string(dtype_name(info.param)); });

TEST_P(AttnPagedPrefillGrid, RaggedBatchesAgreeWithTheDefinition) {
  uint64_t seed = 1;
  kernels::for_each_head_dim([&](int64_t head_dim) {
    for (int64_t page_size : {1, 3, 16, 64}) {
      AttnCase test = ragged_case({5, 0, 1, 33, 2, 7}, {70, 9, 130, 33, 1, 0});
      test.dtype = GetParam();
      test.head_dim = head_dim;
      test.num_q_heads = static_cast<int64_t>(2 * (1 + seed % 7));
      test.num_kv_heads = 2;
      test.page_size = page_size;
      test.layout = static_cast<Layout>(seed % 3);
      test.seed = seed++;
      expect_exact(test);
    }
  });
}

TEST_P(AttnPagedPrefillGrid, OptionsCompose) {
  uint64_t seed = 300;
  for (MaskKind mask : {MaskKind::kNone, MaskKind::kPerKey, MaskKind::kPerQuery}) {
    for (CausalKind causal : {CausalKind::kNone, CausalKind::kFixed, CausalKind::kPerRequest,
                              CausalKind::kFromLengths}) {
      for (int64_t window : {-1, 1, 33}) {
        for (int64_t extra_keys : {-20, 0}) {
          AttnCase test = ragged_case({5, 0, 1, 33, 8}, {70, 9, 130, 33, 3});
          test.dtype = GetParam();
          test.page_size = seed % 2 ? 3 : 16;
          test.layout = static_cast<Layout>(seed % 3);
          test.mask = mask;
          test.mask_extra_keys = extra_keys;
          test.causal = causal;
          test.causal_offset = 20;
          test.causal_offsets = {0, 4, -1, 25, 1000};
          test.window = window;
          test.softcap = seed % 5 == 0 ? 1.5f : 0.0f;
          test.sinks = seed % 4 == 0;
          test.seed = seed++;
          expect_exact(test);
        }
      }
    }
  }
}

// Two queries stand before the first key: they see nothing, in a batch as alone.
TEST(AttnPagedPrefill, QueriesBeforeTheFirstKeySeeNothing) {
  AttnCase test = ragged_case({4}, {2});
  test.num_q_heads = test.num_kv_heads = 1;
  test.head_dim = 32;
  AttnNumbers numbers = make_numbers(test);
  for (float& q : numbers.q) q = 1.0f;
  for (float& k : numbers.k) k = 0.0f;
  for (size_t i = 0; i < 64; ++i) numbers.v[i] = i < 32 ? 10.0f : 20.0f;
  for_each_result(test, numbers, [](const AttnResult& result) {
    const double out[] = {0, 0, 10, 15};
    const double lse[] = {-kInf, -kInf, 0, std::log(2.0)};
    for (size_t row = 0; row < 4; ++row) {
      for (size_t d = 0; d < 32; ++d) EXPECT_NEAR(result.out[row * 32 + d], out[row], 1e-5);
      if (row < 2) {
        EXPECT_EQ(result.lse[row], lse[row]);
      } else {
        EXPECT_NEAR(result.lse[row], lse[row], 1e-5);
      }
    }
  });
}

// The longest request has one or two queries and others have none, or no keys, or neither.
TEST(AttnPagedPrefill, RequestsWithoutQueriesTakeNoPart) {
  for (int64_t first_q_len : {1, 2}) {
    AttnCase test = ragged_case({first_q_len, 0, 1, 0}, {4, 0, 6, 2});
    test.scale = 1.0f;
    AttnNumbers numbers = make_numbers(test);
    for (float& k : numbers.k) k = 0.0f;
    for (size_t b = 0; b < 4; ++b) {
      for (int64_t pos = 0; pos < test.kv_lens[b]; ++pos) {
        for (int64_t i = 0; i < 3 * 64; ++i) {
          const auto at = static_cast<size_t>((numbers.kv_begin[b] + pos) * 3 * 64 + i);
          numbers.v[at] = static_cast<float>(100 * (i / 64) + pos + 1);
        }
      }
    }
    for_each_result(test, numbers, [&](const AttnResult& result) {
      EXPECT_TRUE(result.surroundings_intact);
      // The last query of request 0 sees values 1..4 and the query of request 2 values 1..6.
      const auto expect_row = [&](int64_t row, double mean) {
        for (int64_t i = 0; i < 9 * 64; ++i) {
          const double expected = 100.0 * static_cast<double>(i / 64 / 3) + mean;
          ASSERT_NEAR(result.out[static_cast<size_t>(row * 9 * 64 + i)], expected, 1e-4);
        }
      };
      if (first_q_len == 2) expect_row(0, 2.0);
      expect_row(first_q_len - 1, 2.5);
      expect_row(first_q_len, 3.5);
    });
  }
}

TEST(AttnPagedPrefill, NoQueryAtAllLaunchesNothing) {
  for (const AttnCase& test : {ragged_case({0, 0}, {4, 0}), ragged_case({}, {})}) {
    for_each_result(test, make_numbers(test), [](const AttnResult& result) {
      EXPECT_TRUE(result.out.empty());
      EXPECT_TRUE(result.surroundings_intact);
      EXPECT_EQ(result.launches, 0);
    });
  }
}

TEST(AttnPagedPrefill, NothingPastTheLengthsIsRead) {
  for (int64_t length : {1, 15, 16, 17, 21, 63, 64, 65, 127, 129}) {
    for (int64_t page_size : {1, 16, 64}) {
      AttnCase test = ragged_case({length, 1, 3}, {length, length, length + 1});
      test.dtype = length % 2 ? DType::kBFloat16 : DType::kFloat32;
      test.num_q_heads = 16;
      test.num_kv_heads = 1;
      test.head_dim = 128;
      test.page_size = page_size;
      test.layout = static_cast<Layout>(length % 3);
      expect_poison_is_not_read(test);
    }
  }
}

// One prompt in one piece and cut into chunks, each seeing the keys of those before it.
void expect_chunks_equal_the_whole(DType dtype, int64_t window) {
  const auto make_case = [&](int64_t q_len, int64_t kv_len) {
    AttnCase test = ragged_case({q_len}, {kv_len});
    test.dtype = dtype;
    test.window = window;
    return test;
  };
  const AttnCase whole = make_case(300, 300);
  const AttnNumbers numbers = make_numbers(whole);
  const int64_t row = 9 * 64;
  for (const TestTarget& target : prefill_test_targets()) {
    const AttnResult expected = run_attention(target, whole, numbers);
    int64_t begin = 0;
    for (int64_t chunk : {100, 2, 37, 161}) {
      const AttnCase test = make_case(chunk, begin + chunk);
      AttnNumbers part = make_numbers(test);
      part.q.assign(numbers.q.begin() + begin * row, numbers.q.begin() + (begin + chunk) * row);
      part.k.assign(numbers.k.begin(), numbers.k.begin() + (begin + chunk) * 3 * 64);
      part.v.assign(numbers.v.begin(), numbers.v.begin() + (begin + chunk) * 3 * 64);
      const AttnResult found = run_attention(target, test, part);
      for (int64_t i = 0; i < chunk * row; ++i) {
        ASSERT_EQ(found.out[static_cast<size_t>(i)],
                  expected.out[static_cast<size_t>(begin * row + i)])
            << target.name();
      }
      begin += chunk;
    }
  }
}

TEST(AttnPagedPrefill, ChunksOfAPromptGiveTheBitsOfTheWhole) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    expect_chunks_equal_the_whole(dtype, -1);
    expect_chunks_equal_the_whole(dtype, 50);
  }
}

// A decoding request keeps its bits when it shares a step with a prompt. On the CPU, whose prefill
// decodes such requests; on CUDA only decode is split over keys.
TEST(AttnPagedPrefill, ASingleQueryGetsTheBitsOfDecode) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    AttnCase mixed = ragged_case({1, 20, 1, 1}, {700, 20, 40, 0});
    mixed.dtype = dtype;
    const AttnNumbers numbers = make_numbers(mixed);
    for (const TestTarget& target : test_targets()) {
      const AttnResult together = run_attention(target, mixed, numbers);
      for (size_t b : {0u, 2u, 3u}) {
        AttnCase alone = ragged_case({1}, {mixed.kv_lens[b]});
        alone.op = AttnOp::kPagedDecode;
        alone.causal = CausalKind::kNone;
        alone.dtype = dtype;
        AttnNumbers part = make_numbers(alone);
        const int64_t q_row = numbers.q_begin[b] * 9 * 64;
        const int64_t kv_row = numbers.kv_begin[b] * 3 * 64;
        const int64_t kv_end = numbers.kv_begin[b + 1] * 3 * 64;
        part.q.assign(numbers.q.begin() + q_row, numbers.q.begin() + q_row + 9 * 64);
        part.k.assign(numbers.k.begin() + kv_row, numbers.k.begin() + kv_end);
        part.v.assign(numbers.v.begin() + kv_row, numbers.v.begin() + kv_end);
        const AttnResult found = run_attention(target, alone, part);
        for (size_t i = 0; i < found.out.size(); ++i) {
          ASSERT_EQ(found.out[i], together.out[static_cast<size_t>(q_row) + i]);
        }
      }
    }
  }
}

// ---- bad input --------------------

class AttnPagedPrefillErrors : public ::testing::Test {
 protected:
  static TensorView view(std::initializer_list<int64_t> shape, DType dtype = DType::kFloat32) {
    return TensorView::contiguous(reinterpret_cast<void*>(64), dtype, shape);
  }
  static TensorView numbers(std::vector<int32_t>& values) {
    return TensorView::contiguous(values.data(), DType::kInt32,
                                  {static_cast<int64_t>(values.size())});
  }

  void expect_refused(const std::string& text) {
    const TensorView view_indptr = numbers(indptr);
    const TensorView view_indices = numbers(indices);
    const TensorView view_lens = numbers(lens);
    const TensorView view_qo_indptr = numbers(qo_indptr);
    expect_error<std::invalid_argument>("attn_paged_prefill: " + text, [&] {
      kernels::attn_paged_prefill(q, {k, k, view_indptr, view_indices, view_lens}, view_qo_indptr,
                                  q, causal, options);
    });
  }

  TensorView q = view({5, 6, 64});
  TensorView k = view({5, 16, 2, 64});
  std::vector<int32_t> qo_indptr{0, 4, 5};
  std::vector<int32_t> indptr{0, 2, 3};
  std::vector<int32_t> indices{4, 0, 2};
  std::vector<int32_t> lens{20, 16};
  kernels::PagedCausal causal;
  kernels::AttentionOptions options;
};

TEST_F(AttnPagedPrefillErrors, QueryOffsets) {
  qo_indptr = {1, 4, 5};
  expect_refused("qo_indptr[0] is 1; expected 0");
  qo_indptr = {0, 4, 6};
  expect_refused("qo_indptr ends at 6; expected 5, the rows of q");
  qo_indptr = {0, 6, 5};
  expect_refused("qo_indptr[2] is 5; expected at least the 6 before it");
  qo_indptr = {0, 5};
  expect_refused("qo_indptr has shape [2]; expected [3]");
}

TEST_F(AttnPagedPrefillErrors, Shapes) {
  q = view({1, 5, 6, 64});
  expect_refused("q has shape [1, 5, 6, 64]; expected 3 dimensions, [tokens, q_heads, head_dim]");
}

TEST_F(AttnPagedPrefillErrors, CausalOffsets) {
  causal.from_lengths = false;
  causal.offset = -2;
  expect_refused("causal_offset is -2; expected at least 0, or -1 for not causal");
  std::vector<int32_t> offsets{3, -5};
  TensorView view_offsets = numbers(offsets);
  causal.offsets = &view_offsets;
  expect_refused("causal_offset[1] is -5; expected at least 0, or -1 for not causal");
  view_offsets.shape[0] = 1;
  expect_refused("causal_offset has shape [1]; expected [2]");
}

TEST_F(AttnPagedPrefillErrors, PagesAndMasks) {
  indices[2] = 77;
  expect_refused("kv_indices[2] is 77; expected a page id below 5");
  indices[2] = 2;
  lens[0] = 33;
  expect_refused("kv_lens[0] is 33; expected 0 to 32, what the 2 pages of the request hold");
  lens[0] = 20;
  TensorView mask = view({2, 3, 20}, DType::kBool);
  options.mask = &mask;
  expect_refused("mask has shape [2, 3, 20]; expected [2, keys] or [2, 4, keys]");
}

}  // namespace
}  // namespace astrai::testing
