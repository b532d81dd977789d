#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <stdexcept>

#include "common/counters.h"
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

AttnCase decode_case(int64_t num_requests, int64_t kv_len) {
  AttnCase test;
  test.op = AttnOp::kDecode;
  test.q_lens.assign(static_cast<size_t>(num_requests), 1);
  test.kv_lens.assign(static_cast<size_t>(num_requests), kv_len);
  return test;
}

class AttnDecodeGrid : public ::testing::TestWithParam<DType> {};

INSTANTIATE_TEST_SUITE_P(DTypes, AttnDecodeGrid,
                         ::testing::Values(DType::kFloat32, DType::kFloat16, DType::kBFloat16),
                         [](const auto& info) { return std::string(dtype_name(info.param)); });

// With K = 0 every visible key weighs the same, so that each query head returns exactly the value
// of its KV head.
TEST_P(AttnDecodeGrid, EveryQueryHeadReadsItsKvHead) {
  kernels::for_each_head_dim([&](int64_t head_dim) {
    for (const Heads& heads : kHeads) {
      for (int64_t kv_len : {1, 5, 256, 1000}) {
        AttnCase test = decode_case(1, kv_len);
        test.dtype = GetParam();
        test.num_q_heads = heads.q;
        test.num_kv_heads = heads.kv;
        test.head_dim = head_dim;
        AttnNumbers numbers = make_numbers(test);
        for (float& k : numbers.k) k = 0.0f;
        for (size_t i = 0; i < numbers.v.size(); ++i) {
          numbers.v[i] = static_cast<float>(static_cast<int64_t>(i) / head_dim % heads.kv);
        }
        for_each_result(test, numbers, [&](const AttnResult& result) {
          const int64_t group = heads.q / heads.kv;
          for (int64_t i = 0; i < heads.q * head_dim; ++i) {
            const auto expected = static_cast<double>(i / head_dim / group);
            ASSERT_NEAR(result.out[static_cast<size_t>(i)], expected, 1e-5 * (1 + expected));
          }
          for (double lse : result.lse) {
            ASSERT_NEAR(lse, std::log(static_cast<double>(kv_len)), 1e-5);
          }
        });
      }
    }
  });
}

TEST_P(AttnDecodeGrid, RandomNumbersAgreeWithTheDefinition) {
  uint64_t seed = 1;
  kernels::for_each_head_dim([&](int64_t head_dim) {
    for (const Heads& heads : kHeads) {
      for (int64_t kv_len : {1, 5, 63, 64, 65, 300}) {
        AttnCase test = decode_case(1 + kv_len % 2, kv_len);
        test.dtype = GetParam();
        test.num_q_heads = heads.q;
        test.num_kv_heads = heads.kv;
        test.head_dim = head_dim;
        test.layout = static_cast<Layout>(seed % 4);
        test.seed = seed++;
        expect_exact(test);
      }
    }
  });
}

TEST_P(AttnDecodeGrid, LongContextAgreesWithTheDefinition) {
  AttnCase test = decode_case(1, 2100);
  test.dtype = GetParam();
  test.num_q_heads = 9;
  test.num_kv_heads = 3;
  expect_exact(test);
  test.score_spread = 30.0f;  // a few keys carry nearly all the weight
  expect_exact(test);
}

TEST_P(AttnDecodeGrid, MasksWindowsCapsAndSinksCompose) {
  uint64_t seed = 100;
  for (MaskKind mask : {MaskKind::kNone, MaskKind::kPerKey, MaskKind::kPerQuery}) {
    for (int64_t causal_offset : {-1, 0, 70, 129, 500}) {
      for (int64_t window : {-1, 1, 40, 1000}) {
        for (bool extras : {false, true}) {
          AttnCase test = decode_case(4, 130);
          test.dtype = GetParam();
          test.num_q_heads = 6;
          test.num_kv_heads = 2;
          test.head_dim = seed % 2 ? 64 : 80;
          test.layout = static_cast<Layout>(seed % 4);
          test.mask = mask;
          test.causal = causal_offset < 0 ? CausalKind::kNone : CausalKind::kFixed;
          test.causal_offset = causal_offset;
          test.window = window;
          test.softcap = extras ? 2.5f : 0.0f;
          test.sinks = extras;
          test.score_spread = extras ? 3.0f : 1.0f;
          if (extras) test.scale = -0.2f;
          test.num_splits = seed % 4 == 0 ? 3 : 0;
          test.seed = seed++;
          expect_exact(test);
        }
      }
    }
  }
}

TEST_P(AttnDecodeGrid, AnyNumberOfSplitsGivesTheSameAnswer) {
  for (int64_t kv_len : {1, 7, 200}) {
    for (int64_t num_splits : {1, 2, 3, 7, 50, 256}) {
      for (PartialsKind partials :
           {PartialsKind::kOwn, PartialsKind::kExact, PartialsKind::kOversized}) {
        AttnCase test = decode_case(2, kv_len);
        test.dtype = GetParam();
        test.num_q_heads = 9;
        test.num_kv_heads = 3;
        test.num_splits = num_splits;
        test.partials = partials;
        test.sinks = num_splits == 3;
        test.mask = num_splits == 7 ? MaskKind::kPerKey : MaskKind::kNone;
        test.window = num_splits == 50 ? 33 : -1;
        expect_exact(test);
      }
    }
  }
}

// A softcap near zero argument, far in saturation and between must all keep their digits.
TEST(AttnDecode, SoftcapIsAccurateOverItsRange) {
  for (float softcap : {0.01f, 1.0f, 30.0f, 1000.0f}) {
    for (float spread : {0.001f, 0.3f, 4.0f, 100.0f}) {
      AttnCase test = decode_case(1, 96);
      test.num_q_heads = 4;
      test.num_kv_heads = 2;
      test.softcap = softcap;
      test.score_spread = spread;
      expect_exact(test);
    }
  }
}

TEST(AttnDecode, KeepsAVeryLowScoreApartFromNoKey) {
  AttnCase test = decode_case(1, 1);
  test.head_dim = 32;
  test.scale = 1.0f;
  AttnNumbers numbers = make_numbers(test);
  for (size_t d = 0; d < 32; ++d) {
    numbers.q[d] = d == 0 ? 1.0f : 0.0f;
    numbers.k[d] = d == 0 ? -100000.0f : 0.0f;
    numbers.v[d] = 7.0f;
  }
  for (int64_t splits : {1, 4}) {
    test.num_splits = splits;
    for_each_result(test, numbers, [](const AttnResult& result) {
      for (double value : result.out) EXPECT_EQ(value, 7.0);
      EXPECT_EQ(result.lse[0], -100000.0);
    });
  }
}

TEST(AttnDecode, RowWithoutAnyKeyIsZerosAndMinusInfinity) {
  for (bool sinks : {false, true}) {
    for (int64_t splits : {0, 3}) {
      AttnCase test = decode_case(3, 20);
      test.num_q_heads = 4;
      test.num_kv_heads = 2;
      test.sinks = sinks;
      test.num_splits = splits;
      test.mask = MaskKind::kPerKey;
      AttnNumbers numbers = make_numbers(test);
      for (size_t i = 20; i < 40; ++i) numbers.mask[i] = 0;  // request 1
      for_each_result(test, numbers, [](const AttnResult& result) {
        for (size_t i = 4 * 64; i < 8 * 64; ++i) EXPECT_EQ(result.out[i], 0.0);
        for (size_t i = 4; i < 8; ++i) EXPECT_EQ(result.lse[i], -kInf);
      });
      expect_exact(test, numbers);

      AttnCase empty = decode_case(2, 0);
      empty.sinks = sinks;
      empty.num_splits = splits;
      expect_exact(empty);
    }
  }
}

TEST(AttnDecode, HiddenKeysMayHoldAnything) {
  for (float hidden : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      AttnCase test = decode_case(2, 150);
      test.dtype = dtype;
      test.num_q_heads = 6;
      test.num_kv_heads = 2;
      test.mask = MaskKind::kPerKey;
      test.causal = CausalKind::kFixed;
      test.causal_offset = 120;
      test.window = 90;
      AttnNumbers numbers = make_numbers(test);
      for (int64_t b = 0; b < 2; ++b) {
        for (int64_t key = 0; key < 150; ++key) {
          if (sees(test, numbers, b, 0, key)) continue;
          const auto first = static_cast<size_t>((b * 150 + key) * 2 * 64);
          for (size_t i = first; i < first + 2 * 64; ++i) numbers.k[i] = numbers.v[i] = hidden;
        }
      }
      expect_exact(test, numbers);
    }
  }
}

TEST(AttnDecode, AVisibleNanIsNotSwallowed) {
  for (bool in_key : {true, false}) {
    for (int64_t kv_len : {1, 70}) {
      AttnCase test = decode_case(1, kv_len);
      test.head_dim = 32;
      AttnNumbers numbers = make_numbers(test);
      (in_key ? numbers.k : numbers.v)[5] = std::nanf("");
      for_each_result(test, numbers, [&](const AttnResult& result) {
        for (size_t d = 0; d < 32; ++d) {
          EXPECT_EQ(std::isnan(result.out[d]), in_key || d == 5) << d;
        }
      });
    }
  }
}

TEST(AttnDecode, PaddingAroundTheTensorsIsNotRead) {
  for (int64_t kv_len : {1, 15, 16, 17, 21, 63, 64, 65, 127, 129}) {
    for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      AttnCase test = decode_case(2, kv_len);
      test.dtype = dtype;
      test.num_q_heads = 16;
      test.num_kv_heads = 1;
      test.head_dim = 128;
      for (Layout layout : {Layout::kInterleaved, Layout::kAligned}) {
        test.layout = layout;
        expect_poison_is_not_read(test);
      }
    }
  }
}

TEST(AttnDecode, ReturnsNoLseUnlessAsked) {
  AttnCase test = decode_case(1, 9);
  test.want_lse = false;
  expect_exact(test);
}

TEST(AttnDecode, EmptyBatchLaunchesNothing) {
  AttnCase test = decode_case(0, 0);
  test.q_lens.clear();
  test.kv_lens.clear();
  for_each_result(test, make_numbers(test), [](const AttnResult& result) {
    EXPECT_TRUE(result.out.empty());
    EXPECT_EQ(result.launches, 0);
  });
}

TEST(AttnDecode, SteadyStateAllocatesNothing) {
  AttnCase test = decode_case(2, 3000);
  test.num_q_heads = 9;
  test.num_kv_heads = 3;
  const AttnNumbers numbers = make_numbers(test);
  const TestTarget target = test_targets().front();
  // Each thread grows its scratch in the first launches that reach it.
  for (int i = 0; i < 5; ++i) run_attention(target, test, numbers);
  const int64_t before = counters().host_allocations;
  const AttnResult result = run_attention(target, test, numbers);
  EXPECT_EQ(counters().host_allocations, before);
  EXPECT_EQ(result.launches, 1);
}

// ---- bad input --------------------

// Tensors with addresses that must never be touched: every call below is refused before that.
class AttnDecodeErrors : public ::testing::Test {
 protected:
  static TensorView view(std::initializer_list<int64_t> shape, DType dtype = DType::kFloat32) {
    return TensorView::contiguous(reinterpret_cast<void*>(64), dtype, shape);
  }

  void expect_refused(const std::string& text) {
    expect_error<std::invalid_argument>("attn_decode: " + text, [&] {
      kernels::attn_decode(q, k, v, out, causal_offset, options);
    });
  }

  TensorView q = view({2, 1, 6, 64});
  TensorView k = view({2, 10, 2, 64});
  TensorView v = view({2, 10, 2, 64});
  TensorView out = view({2, 1, 6, 64});
  int64_t causal_offset = -1;
  kernels::AttentionOptions options;
};

TEST_F(AttnDecodeErrors, HeadDimOutsideTheList) {
  q = view({2, 1, 6, 72});
  expect_refused("q has head_dim 72; expected one of 32, 64, 80, 96, 128, 256");
}

TEST_F(AttnDecodeErrors, HeadDimsDiffer) {
  k = view({2, 10, 2, 96});
  expect_refused("k has head_dim 96; expected 64, as q has");
}

TEST_F(AttnDecodeErrors, Ranks) {
  q = view({2, 6, 64});
  expect_refused(
      "q has shape [2, 6, 64]; expected 4 dimensions, [batch, q_len, q_heads, head_dim]");
}

TEST_F(AttnDecodeErrors, KvRanks) {
  v = view({20, 2, 64});
  expect_refused(
      "v has shape [20, 2, 64]; expected 4 dimensions, [batch, kv_len, kv_heads, head_dim]");
}

TEST_F(AttnDecodeErrors, MoreThanOneQuery) {
  q = out = view({2, 3, 6, 64});
  expect_refused("q has q_len 3; expected 1, use attn_prefill for more");
}

TEST_F(AttnDecodeErrors, DTypes) {
  q.dtype = DType::kInt32;
  expect_refused("q has dtype int32; expected float32, float16 or bfloat16");
  q.dtype = DType::kBFloat16;
  expect_refused("k has dtype float32; expected bfloat16");
}

TEST_F(AttnDecodeErrors, Devices) {
  v.device = {DeviceType::kCuda, 1};
  expect_refused("v is on cuda:1; expected cpu, as q is");
}

TEST_F(AttnDecodeErrors, Shapes) {
  k = view({3, 10, 2, 64});
  expect_refused("k has batch 3; expected 2, as q has");
  k = view({2, 11, 2, 64});
  expect_refused("v has kv_len 10; expected 11, as k has");
  k = view({2, 10, 3, 64});
  expect_refused("v has kv_heads 2; expected 3, as k has");
  out = view({2, 1, 5, 64});
  k = view({2, 10, 2, 64});
  expect_refused("out has shape [2, 1, 5, 64]; expected [2, 1, 6, 64], as q has");
}

TEST_F(AttnDecodeErrors, HeadsThatDoNotDivide) {
  k = v = view({2, 10, 4, 64});
  expect_refused("q has 6 heads; expected a multiple of the 4 KV heads");
  k = v = view({2, 10, 0, 64});
  expect_refused("q has 6 heads and k has 0; expected at least 1 of each");
}

TEST_F(AttnDecodeErrors, Strides) {
  k.strides[3] = 2;
  expect_refused("k has stride 2 in its last dimension; expected 1");
  k.strides[3] = 1;
  out.strides[0] = 0;
  expect_refused(
      "out of shape [2, 1, 6, 64] has rows that overlap in memory; expected strides that keep them "
      "apart");
  out.strides[0] = 6 * 64;
  out.strides[2] = 63;
  expect_refused(
      "out of shape [2, 1, 6, 64] has rows that overlap in memory; expected strides that keep them "
      "apart");
}

TEST_F(AttnDecodeErrors, Numbers) {
  options.window = 0;
  expect_refused("window is 0; expected at least 1, or -1 for none");
  options.window = -2;
  expect_refused("window is -2; expected at least 1, or -1 for none");
  options.window = -1;
  options.softcap = -1.0f;
  expect_refused("softcap is -1; expected a finite number >= 0 (0 = none)");
  options.softcap = std::numeric_limits<float>::infinity();
  expect_refused("softcap is inf; expected a finite number >= 0 (0 = none)");
  options.softcap = 0.0f;
  options.scale = std::nanf("");
  expect_refused("scale is nan; expected a finite number");
  options.scale.reset();
  causal_offset = -2;
  expect_refused("causal_offset is -2; expected at least 0, or -1 for not causal");
}

TEST_F(AttnDecodeErrors, FixedSplits) {
  options.fixed_split_keys = 100;
  expect_refused("fixed_split_keys is 100; expected 0 or a multiple of 128");
  options.fixed_split_keys = -128;
  expect_refused("fixed_split_keys is -128; expected 0 or a multiple of 128");
  options.fixed_split_keys = 256;
  options.num_splits = 3;
  expect_refused("num_splits is 3; expected 0, since fixed_split_keys is given too");
}

TEST_F(AttnDecodeErrors, Masks) {
  TensorView mask = view({2, 10});
  options.mask = &mask;
  expect_refused("mask has dtype float32; expected bool");
  for (const auto& shape : {std::initializer_list<int64_t>{2, 9}, {1, 10}, {2, 2, 10}, {20}}) {
    mask = view(shape, DType::kBool);
    expect_refused("mask has shape " + mask.shape_string() + "; expected [2, 10] or [2, 1, 10]");
  }
}

TEST_F(AttnDecodeErrors, SinksAndLse) {
  TensorView sinks = view({2});
  options.sinks = &sinks;
  expect_refused("sinks has shape [2]; expected [6], one for each query head");
  sinks = view({6}, DType::kBFloat16);
  expect_refused("sinks has dtype bfloat16; expected float32");
  options.sinks = nullptr;
  TensorView lse = view({2, 6});
  options.lse = &lse;
  expect_refused("lse has shape [2, 6]; expected [2, 6, 1]");
  lse = view({2, 6, 1});
  lse.strides[0] = 7;
  expect_refused("lse of shape [2, 6, 1] is not contiguous; expected a contiguous tensor");
}

TEST_F(AttnDecodeErrors, Partials) {
  TensorView o_part = view({2, 6, 4, 64});
  TensorView ml_part = view({2, 6, 4, 2});
  options.o_part = &o_part;
  expect_refused("o_part is given alone; expected o_part and ml_part, or neither");
  options.ml_part = &ml_part;
  options.num_splits = 5;
  expect_refused("num_splits is 5; expected at most the 4 that o_part holds");
  options.num_splits = -1;
  expect_refused("num_splits is -1; expected 0 (choose) to 1024");
  options.num_splits = 0;
  o_part = view({1, 6, 4, 64});
  expect_refused("o_part has shape [1, 6, 4, 64]; expected [>= 2, 6, splits >= 1, 64]");
  o_part = view({2, 6, 3, 64});
  expect_refused("ml_part has splits 4; expected 3, as o_part has");
  o_part = view({2, 6, 4, 64}, DType::kFloat16);
  expect_refused("o_part has dtype float16; expected float32");
}

#if !ASTRAI_WITH_CUDA
TEST_F(AttnDecodeErrors, CudaTensorsWithoutCudaKernels) {
  for (TensorView* tensor : {&q, &k, &v, &out}) tensor->device = {DeviceType::kCuda, 0};
  expect_error<std::runtime_error>(
      "attn_decode: tensors are on a CUDA device, but this build has no CUDA kernel for it; "
      "expected CPU tensors, or a build whose CUDA kernels include this operation",
      [&] { kernels::attn_decode(q, k, v, out, causal_offset, options); });
}
#endif

}  // namespace
}  // namespace astrai::testing
