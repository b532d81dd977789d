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

struct Heads {
  int64_t q;
  int64_t kv;
};
constexpr Heads kHeads[] = {{28, 4}, {24, 4}, {15, 3}, {9, 3}, {64, 4}, {8, 8}, {8, 1}};

AttnCase prefill_case(int64_t num_requests, int64_t q_len, int64_t kv_len) {
  AttnCase test;
  test.op = AttnOp::kPrefill;
  test.q_lens.assign(static_cast<size_t>(num_requests), q_len);
  test.kv_lens.assign(static_cast<size_t>(num_requests), kv_len);
  return test;
}

class AttnPrefillGrid : public ::testing::TestWithParam<DType> {};

INSTANTIATE_TEST_SUITE_P(DTypes, AttnPrefillGrid,
                         ::testing::Values(DType::kFloat32, DType::kFloat16, DType::kBFloat16),
                         [](const auto& info) { return std::string(dtype_name(info.param)); });

TEST_P(AttnPrefillGrid, RandomNumbersAgreeWithTheDefinition) {
  uint64_t seed = 1;
  kernels::for_each_head_dim([&](int64_t head_dim) {
    for (const Heads& heads : kHeads) {
      for (int64_t q_len : {1, 5, 17}) {
        AttnCase test = prefill_case(1, q_len, 40 + 30 * static_cast<int64_t>(seed % 4));
        test.dtype = GetParam();
        test.num_q_heads = heads.q;
        test.num_kv_heads = heads.kv;
        test.head_dim = head_dim;
        test.layout = static_cast<Layout>(seed % 3);
        test.causal = seed % 2 ? CausalKind::kFixed : CausalKind::kNone;
        test.causal_offset = static_cast<int64_t>(seed % 50);
        test.seed = seed++;
        expect_exact(test);
      }
    }
  });
}

TEST_P(AttnPrefillGrid, TilesOfQueriesAndKeysMeetAtEveryBorder) {
  for (int64_t q_len : {59, 60, 61, 121, 130}) {
    for (int64_t kv_len : {63, 64, 65, 192, 200}) {
      AttnCase test = prefill_case(2, q_len, kv_len);
      test.dtype = GetParam();
      test.num_q_heads = q_len % 2 ? 2 : 3;
      test.head_dim = 32;
      test.causal = CausalKind::kFixed;
      test.causal_offset = kv_len > q_len ? kv_len - q_len : 0;
      expect_exact(test);
    }
  }
}

TEST_P(AttnPrefillGrid, MasksWindowsCapsAndSinksCompose) {
  uint64_t seed = 100;
  for (MaskKind mask : {MaskKind::kNone, MaskKind::kPerKey, MaskKind::kPerQuery}) {
    for (int64_t causal_offset : {-1, 0, 60, 120, 500}) {
      for (int64_t window : {-1, 1, 40, 1000}) {
        for (bool extras : {false, true}) {
          AttnCase test = prefill_case(3, 23, 130);
          test.dtype = GetParam();
          test.num_q_heads = 6;
          test.num_kv_heads = 2;
          test.head_dim = seed % 2 ? 64 : 80;
          test.layout = static_cast<Layout>(seed % 3);
          test.mask = mask;
          test.causal = causal_offset < 0 ? CausalKind::kNone : CausalKind::kFixed;
          test.causal_offset = causal_offset;
          test.window = window;
          test.softcap = extras ? 2.5f : 0.0f;
          test.sinks = extras;
          if (extras) test.scale = 0.3f;
          test.seed = seed++;
          expect_exact(test);
        }
      }
    }
  }
}

TEST_P(AttnPrefillGrid, MoreQueryHeadsThanATileHasRows) {
  AttnCase test = prefill_case(1, 3, 70);
  test.dtype = GetParam();
  test.num_q_heads = 71;
  test.head_dim = 32;
  expect_exact(test);
}

TEST(AttnPrefill, RowWithoutAnyKeyIsZerosAndMinusInfinity) {
  for (bool sinks : {false, true}) {
    AttnCase test = prefill_case(1, 3, 5);
    test.head_dim = 32;
    test.sinks = sinks;
    test.mask = MaskKind::kPerQuery;
    AttnNumbers numbers = make_numbers(test);
    for (size_t i = 0; i < 15; ++i) numbers.mask[i] = i < 5 || i >= 10;  // row 1 sees nothing
    for_each_result(test, numbers, [](const AttnResult& result) {
      for (size_t d = 0; d < 32; ++d) EXPECT_EQ(result.out[32 + d], 0.0);
      EXPECT_EQ(result.lse[1], -kInf);
    });
    expect_exact(test, numbers);
  }
  expect_exact(prefill_case(2, 7, 0));
}

TEST(AttnPrefill, KeepsAVeryLowScoreApartFromNoKey) {
  AttnCase test = prefill_case(1, 2, 1);
  test.head_dim = 32;
  test.scale = 1.0f;
  AttnNumbers numbers = make_numbers(test);
  for (size_t i = 0; i < 64; ++i) numbers.q[i] = i % 32 == 0 ? 1.0f : 0.0f;
  for (size_t d = 0; d < 32; ++d) {
    numbers.k[d] = d == 0 ? -100000.0f : 0.0f;
    numbers.v[d] = 7.0f;
  }
  for_each_result(test, numbers, [](const AttnResult& result) {
    for (double value : result.out) EXPECT_EQ(value, 7.0);
    for (double lse : result.lse) EXPECT_EQ(lse, -100000.0);
  });
}

// A batch of one with four keys that hold `wild`: rows that see one are NaN, the others as without.
void expect_wild_keys_stay_hidden(const AttnCase& test, float wild) {
  constexpr int64_t kWild[] = {0, 21, 70, 99};
  const int64_t kv_row = test.num_kv_heads * test.head_dim;
  const int64_t q_row = test.num_q_heads * test.head_dim;
  const AttnNumbers clean = make_numbers(test);
  AttnNumbers dirty = clean;
  for (int64_t key : kWild) {
    for (int64_t i = key * kv_row; i < (key + 1) * kv_row; ++i) {
      dirty.k[static_cast<size_t>(i)] = wild;
      dirty.v[static_cast<size_t>(i)] = wild;
    }
  }
  for (const TestTarget& target : prefill_test_targets()) {
    const AttnResult expected = run_attention(target, test, clean);
    const AttnResult found = run_attention(target, test, dirty);
    for (int64_t row = 0; row < test.q_lens[0]; ++row) {
      bool touched = false;
      for (int64_t key : kWild) touched |= sees(test, clean, 0, row, key);
      for (int64_t i = row * q_row; i < (row + 1) * q_row; ++i) {
        const auto at = static_cast<size_t>(i);
        if (touched) {
          ASSERT_TRUE(std::isnan(found.out[at])) << target.name() << " row " << row;
        } else {
          ASSERT_EQ(found.out[at], expected.out[at]) << target.name() << " row " << row;
        }
      }
    }
  }
}

// A value that one row sees and its neighbour in the same tile does not.
TEST(AttnPrefill, HiddenKeysMayHoldAnythingEvenIfANeighbourSeesThem) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (MaskKind mask : {MaskKind::kNone, MaskKind::kPerKey, MaskKind::kPerQuery}) {
      AttnCase test = prefill_case(1, 40, 100);
      test.dtype = dtype;
      test.num_q_heads = 4;
      test.num_kv_heads = 2;
      test.mask = mask;
      test.causal = CausalKind::kFixed;
      test.causal_offset = 50;
      test.window = 30;
      expect_wild_keys_stay_hidden(test, std::nanf(""));
      expect_wild_keys_stay_hidden(test, std::numeric_limits<float>::infinity());
    }
  }
}

TEST(AttnPrefill, PaddingAroundTheTensorsIsNotRead) {
  for (int64_t length : {1, 15, 16, 17, 21, 63, 64, 65, 127, 129}) {
    AttnCase test = prefill_case(2, length, length);
    test.dtype = length % 2 ? DType::kFloat32 : DType::kBFloat16;
    test.num_q_heads = 16;
    test.num_kv_heads = 1;
    test.head_dim = 128;
    test.layout = Layout::kInterleaved;
    test.causal = CausalKind::kFixed;
    expect_poison_is_not_read(test);
  }
}

TEST(AttnPrefill, EmptyTensorsLaunchNothing) {
  for (const AttnCase& test : {prefill_case(0, 0, 0), prefill_case(3, 0, 9)}) {
    for_each_result(test, make_numbers(test), [](const AttnResult& result) {
      EXPECT_TRUE(result.out.empty());
      EXPECT_EQ(result.launches, 0);
    });
  }
}

TEST(AttnPrefill, RefusesWhatDoesNotFit) {
  const auto view = [](std::initializer_list<int64_t> shape, DType dtype = DType::kFloat32) {
    return TensorView::contiguous(reinterpret_cast<void*>(64), dtype, shape);
  };
  const TensorView q = view({1, 4, 6, 64});
  const TensorView kv = view({1, 9, 2, 64});
  kernels::AttentionOptions options;
  options.num_splits = 2;
  expect_error<std::invalid_argument>(
      "attn_prefill: num_splits is 2; expected 0 or 1, since prefill is split over queries only",
      [&] { kernels::attn_prefill(q, kv, kv, q, -1, options); });
  options = {};
  const TensorView mask = view({1, 5, 9}, DType::kBool);
  options.mask = &mask;
  expect_error<std::invalid_argument>(
      "attn_prefill: mask has shape [1, 5, 9]; expected [1, 9] or [1, 4, 9]",
      [&] { kernels::attn_prefill(q, kv, kv, q, -1, options); });
  options = {};
  const TensorView lse = view({1, 4, 6});
  options.lse = &lse;
  expect_error<std::invalid_argument>("attn_prefill: lse has shape [1, 4, 6]; expected [1, 6, 4]",
                                      [&] { kernels::attn_prefill(q, kv, kv, q, -1, options); });
  options = {};
  expect_error<std::invalid_argument>(
      "attn_prefill: v has head_dim 32; expected 64, as q has",
      [&] { kernels::attn_prefill(q, kv, view({1, 9, 2, 32}), q, -1, options); });
}

}  // namespace
}  // namespace astrai::testing
