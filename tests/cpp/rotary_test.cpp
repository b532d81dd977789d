#include "kernels/rope/rotary.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "common/counters.h"
#include "support/expect_error.h"
#include "support/test_random.h"
#include "support/test_target.h"
#include "support/test_tensor.h"
#include "support/tolerance.h"

namespace astrai::kernels {
namespace {

using testing::kFloatTypes;
using testing::Poison;
using testing::Random;
using testing::TestTarget;
using testing::TestTensor;

// cos and sin of position * theta^(-2i / R), from the definition.
std::vector<float> make_table(int64_t max_position, int64_t rotary_dim, double theta) {
  std::vector<float> table(static_cast<size_t>(max_position * rotary_dim));
  const int64_t half = rotary_dim / 2;
  for (int64_t position = 0; position < max_position; ++position) {
    for (int64_t i = 0; i < half; ++i) {
      const double frequency =
          std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(rotary_dim));
      const double angle = static_cast<double>(position) * frequency;
      table[static_cast<size_t>(position * rotary_dim + i)] = static_cast<float>(std::cos(angle));
      table[static_cast<size_t>(position * rotary_dim + half + i)] =
          static_cast<float>(std::sin(angle));
    }
  }
  return table;
}

struct Case {
  int64_t num_tokens = 3;
  int64_t num_q_heads = 3;
  int64_t num_kv_heads = 1;  // 0 = no k
  int64_t head_dim = 16;
  int64_t rotary_dim = 16;
  DType dtype = DType::kFloat32;
  bool interleaved = false;
  bool wide_positions = true;
  bool fused = false;  // q and k are slices of one buffer [T, (Hq + Hkv) * D]

  std::string name() const {
    return concat("T ", num_tokens, " heads ", num_q_heads, ":", num_kv_heads, " D ", head_dim,
                  " R ", rotary_dim, " ", dtype_name(dtype), interleaved ? " interleaved" : "",
                  wide_positions ? " int64" : " int32", fused ? " fused" : "");
  }
};

void fill(TestTensor& tensor, const Case& test, int64_t heads, Random& random) {
  for (int64_t t = 0; t < test.num_tokens; ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t d = 0; d < test.head_dim; ++d) tensor.set({t, h, d}, random.normal());
    }
  }
}

// Compares heads [first, first + heads) of `after` with the definition applied to `before`.
void compare(const TestTensor& before, const TestTensor& after, const Case& test, int64_t heads,
             const std::vector<float>& table, const std::vector<int64_t>& positions) {
  const int64_t half = test.rotary_dim / 2;
  for (int64_t t = 0; t < test.num_tokens; ++t) {
    const float* row =
        &table[static_cast<size_t>(positions[static_cast<size_t>(t)] * test.rotary_dim)];
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t i = 0; i < half; ++i) {
        const int64_t first = test.interleaved ? 2 * i : i;
        const int64_t second = test.interleaved ? 2 * i + 1 : i + half;
        const double x = before.get({t, h, first});
        const double y = before.get({t, h, second});
        const double cosine = row[i];
        const double sine = row[half + i];
        const double expected_x = x * cosine - y * sine;
        const double expected_y = y * cosine + x * sine;
        const double slack = 3e-7 * (std::abs(x) + std::abs(y));
        ASSERT_NEAR(after.get({t, h, first}), expected_x,
                    slack + 1.01 * testing::rounding_error(test.dtype, expected_x))
            << "token " << t << " head " << h << " pair " << i;
        ASSERT_NEAR(after.get({t, h, second}), expected_y,
                    slack + 1.01 * testing::rounding_error(test.dtype, expected_y))
            << "token " << t << " head " << h << " pair " << i;
      }
      for (int64_t d = test.rotary_dim; d < test.head_dim; ++d) {
        ASSERT_EQ(after.get({t, h, d}), before.get({t, h, d})) << "lane " << d;
      }
    }
  }
}

void check(const TestTarget& target, const Case& test) {
  SCOPED_TRACE(concat(target.name(), " ", test.name(), " seed ", testing::test_seed()));
  target.activate();
  Random random(testing::test_seed());
  constexpr int64_t kMaxPosition = 40;
  std::vector<float> table = make_table(kMaxPosition, test.rotary_dim, 10000.0);
  TestTensor cos_sin(target.device, DType::kFloat32, {kMaxPosition, test.rotary_dim},
                     {test.rotary_dim + 3, 1}, Poison::kNan);
  for (int64_t p = 0; p < kMaxPosition; ++p) {
    for (int64_t i = 0; i < test.rotary_dim; ++i) {
      cos_sin.set({p, i}, table[static_cast<size_t>(p * test.rotary_dim + i)]);
    }
  }
  TestTensor positions(target.device, test.wide_positions ? DType::kInt64 : DType::kInt32,
                       {test.num_tokens}, Poison::kNan);
  std::vector<int64_t> chosen;
  for (int64_t t = 0; t < test.num_tokens; ++t) {
    chosen.push_back(random.below(kMaxPosition));
    positions.set({t}, static_cast<double>(chosen.back()));
  }

  const int64_t gap = test.fused ? 0 : 5;
  const int64_t heads = test.num_q_heads + (test.fused ? test.num_kv_heads : 0);
  TestTensor q(target.device, test.dtype, {test.num_tokens, heads, test.head_dim},
               {heads * (test.head_dim + gap) + gap, test.head_dim + gap, 1}, Poison::kNan);
  TestTensor k(target.device, test.dtype, {test.num_tokens, test.num_kv_heads, test.head_dim},
               {test.num_kv_heads * test.head_dim + 9, test.head_dim, 1}, Poison::kNan);
  fill(q, test, heads, random);
  fill(k, test, test.num_kv_heads, random);
  const TestTensor old_q = q;
  const TestTensor old_k = k;

  TensorView q_view = q.upload();
  TensorView k_view = k.upload();
  if (test.fused) {
    k_view = q_view;
    q_view.shape[1] = test.num_q_heads;
    k_view.shape[1] = test.num_kv_heads;
    k_view.data = static_cast<uint8_t*>(q_view.data) +
                  test.num_q_heads * test.head_dim * dtype_bytes(test.dtype);
  }
  rotary(q_view, test.num_kv_heads > 0 ? &k_view : nullptr, positions.upload(), cos_sin.upload(),
         test.interleaved, nullptr);
  q.download();
  k.download();
  ASSERT_TRUE(q.surroundings_intact());
  ASSERT_TRUE(k.surroundings_intact());
  compare(old_q, q, test, heads, table, chosen);
  if (!test.fused) compare(old_k, k, test, test.num_kv_heads, table, chosen);
}

TEST(Rotary, MatchesTheDefinitionInEveryWidth) {
  for (const TestTarget& target : testing::all_test_targets()) {
    for (DType dtype : kFloatTypes) {
      for (bool interleaved : {false, true}) {
        for (int64_t rotary_dim : {2, 4, 6, 14, 16, 20, 32, 34, 64, 66, 80}) {
          check(target, {.head_dim = 80,
                         .rotary_dim = rotary_dim,
                         .dtype = dtype,
                         .interleaved = interleaved,
                         .wide_positions = rotary_dim % 4 == 0});
        }
      }
    }
  }
}

TEST(Rotary, TurnsQAndKInsideOneFusedBuffer) {
  for (const TestTarget& target : testing::all_test_targets()) {
    for (int64_t num_tokens : {1, 5}) {
      check(target, {.num_tokens = num_tokens,
                     .num_q_heads = 9,
                     .num_kv_heads = 3,
                     .head_dim = 64,
                     .rotary_dim = 64,
                     .dtype = DType::kBFloat16,
                     .fused = true});
    }
  }
}

TEST(Rotary, WorksWithoutK) {
  for (const TestTarget& target : testing::all_test_targets()) check(target, {.num_kv_heads = 0});
}

TEST(Rotary, ManyTokensOverThreads) {
  for (const TestTarget& target : testing::all_test_targets()) {
    check(target, {.num_tokens = 200,
                   .num_q_heads = 9,
                   .num_kv_heads = 3,
                   .head_dim = 64,
                   .rotary_dim = 64,
                   .dtype = DType::kBFloat16});
  }
}

// Width 4 of 16 lanes at position 3, theta 10000: frequencies come from the rotary width, not from
// the head dim. The numbers are cos and sin of 3 and of 0.03.
class PartialRotary : public ::testing::TestWithParam<bool> {
 protected:
  std::vector<float> turn_unit_vector(int lane) {
    std::vector<float> table = make_table(4, 4, 10000.0);
    std::vector<float> x(16, 0.0f);
    x[static_cast<size_t>(lane)] = 1.0f;
    int64_t position = 3;
    rotary(TensorView::contiguous(x.data(), DType::kFloat32, {1, 1, 16}), nullptr,
           TensorView::contiguous(&position, DType::kInt64, {1}),
           TensorView::contiguous(table.data(), DType::kFloat32, {4, 4}), GetParam(), nullptr);
    return x;
  }
};

TEST_P(PartialRotary, TurnsThePairsOfTheRotaryWidth) {
  for (const TestTarget& target : testing::test_targets()) {
    SCOPED_TRACE(target.name());
    target.activate();
    const bool interleaved = GetParam();
    const std::vector<float> e0 = turn_unit_vector(0);
    const size_t partner = interleaved ? 1 : 2;
    EXPECT_NEAR(e0[0], -0.989992f, 1e-6f);
    EXPECT_NEAR(e0[partner], 0.141120f, 1e-6f);
    EXPECT_EQ(e0[interleaved ? 2 : 1], 0.0f);
    // The first lane of the second pair.
    const size_t second = interleaved ? 2 : 1;
    const std::vector<float> e1 = turn_unit_vector(static_cast<int>(second));
    EXPECT_NEAR(e1[second], 0.999550f, 1e-6f);
    EXPECT_NEAR(e1[3], 0.029996f, 1e-6f);
  }
}

TEST_P(PartialRotary, LeavesOtherLanesAlone) {
  for (const TestTarget& target : testing::test_targets()) {
    target.activate();
    std::vector<float> expected(16, 0.0f);
    expected[5] = 1.0f;
    EXPECT_EQ(turn_unit_vector(5), expected) << target.name();
  }
}

INSTANTIATE_TEST_SUITE_P(Pairings, PartialRotary, ::testing::Bool(), [](const auto& param) {
  return param.param ? "Interleaved" : "HalfSplit";
});

TEST(Rotary, LanesPastTheWidthKeepTheirBitsEvenIfNan) {
  for (const TestTarget& target : testing::test_targets()) {
    target.activate();
    std::vector<float> table = make_table(4, 4, 10000.0);
    const uint32_t payload = 0x7fa12345u;  // a signalling NaN
    std::vector<uint32_t> x(8, payload);
    for (size_t i = 0; i < 4; ++i) x[i] = 0x3f800000u;
    int32_t position = 1;
    rotary(TensorView::contiguous(x.data(), DType::kFloat32, {1, 1, 8}), nullptr,
           TensorView::contiguous(&position, DType::kInt32, {1}),
           TensorView::contiguous(table.data(), DType::kFloat32, {4, 4}), false, nullptr);
    for (size_t i = 4; i < 8; ++i) EXPECT_EQ(x[i], payload) << target.name();
    EXPECT_NE(x[0], 0x3f800000u);
  }
}

TEST(Rotary, NothingToTurnLaunchesNothing) {
  counters().reset();
  std::vector<float> x(8, 1.0f);
  int64_t position = 2;
  // Width 0.
  rotary(TensorView::contiguous(x.data(), DType::kFloat32, {1, 1, 8}), nullptr,
         TensorView::contiguous(&position, DType::kInt64, {1}),
         TensorView::contiguous(nullptr, DType::kFloat32, {4, 0}), false, nullptr);
  // No tokens.
  rotary(TensorView::contiguous(nullptr, DType::kFloat32, {0, 1, 8}), nullptr,
         TensorView::contiguous(nullptr, DType::kInt64, {0}),
         TensorView::contiguous(x.data(), DType::kFloat32, {2, 4}), false, nullptr);
  EXPECT_EQ(counters().launches.load(), 0);
  EXPECT_EQ(x, std::vector<float>(8, 1.0f));
}

class RotaryErrors : public ::testing::Test {
 protected:
  void expect(const std::string& text) {
    testing::expect_error<std::invalid_argument>("rotary: " + text, [&] {
      rotary(q_, with_k_ ? &k_ : nullptr, positions_, cos_sin_, false, nullptr);
    });
    EXPECT_EQ(memory_, std::vector<float>(256, 1.0f));
  }

  std::vector<float> memory_ = std::vector<float>(256, 1.0f);
  std::vector<int64_t> position_memory_ = {0, 3};
  std::vector<float> table_ = make_table(4, 8, 10000.0);
  TensorView q_ = TensorView::contiguous(memory_.data(), DType::kFloat32, {2, 2, 8});
  TensorView k_ = TensorView::contiguous(memory_.data() + 64, DType::kFloat32, {2, 1, 8});
  TensorView positions_ = TensorView::contiguous(position_memory_.data(), DType::kInt64, {2});
  TensorView cos_sin_ = TensorView::contiguous(table_.data(), DType::kFloat32, {4, 8});
  bool with_k_ = true;
};

TEST_F(RotaryErrors, PositionsAreCheckedBeforeAnythingIsTurned) {
  position_memory_[1] = 4;
  expect("positions[1] is 4; expected 0 to 3, the rows of cos_sin");
  position_memory_[1] = -1;
  expect("positions[1] is -1; expected 0 to 3, the rows of cos_sin");
  position_memory_[1] = int64_t{1} << 40;
  expect("positions[1] is 1099511627776; expected 0 to 3, the rows of cos_sin");
  std::vector<int32_t> narrow = {2, -7};
  positions_ = TensorView::contiguous(narrow.data(), DType::kInt32, {2});
  expect("positions[1] is -7; expected 0 to 3, the rows of cos_sin");
}

TEST_F(RotaryErrors, Widths) {
  cos_sin_ = TensorView::contiguous(table_.data(), DType::kFloat32, {4, 3});
  expect("cos_sin has rotary width 3; expected an even number");
  cos_sin_ = TensorView::contiguous(table_.data(), DType::kFloat32, {2, 10});
  expect("cos_sin has rotary width 10; expected at most the head dim 8");
}

TEST_F(RotaryErrors, ShapesAndDtypes) {
  positions_.shape[0] = 1;
  expect("positions has shape [1]; expected 2 in dimension 0, the tokens of q");
  positions_.shape[0] = 2;
  positions_.dtype = DType::kFloat32;
  expect("positions has dtype float32; expected int32 or int64");
  positions_.dtype = DType::kInt64;
  k_.dtype = DType::kBFloat16;
  expect("k has dtype bfloat16; expected float32 as q");
  k_ = TensorView::contiguous(memory_.data() + 64, DType::kFloat32, {2, 1, 4});
  expect("k has shape [2, 1, 4]; expected 8 in dimension 2, the head dim of q");
  k_ = TensorView::contiguous(memory_.data() + 64, DType::kFloat32, {3, 1, 8});
  expect("k has shape [3, 1, 8]; expected 2 in dimension 0, the tokens of q");
  cos_sin_.dtype = DType::kFloat16;
  expect("cos_sin has dtype float16; expected float32");
  q_ = TensorView::contiguous(memory_.data(), DType::kFloat32, {4, 8});
  expect("q has 2 dimensions (shape [4, 8]); expected 3");
}

TEST_F(RotaryErrors, StridesAndOverlap) {
  k_.data = memory_.data() + 24;
  expect("k overlaps q in memory; expected separate memory");
  k_.data = memory_.data() + 64;
  q_.strides[1] = 4;
  expect(
      "q is written but its elements overlap (a stride of 4 over 8 elements); expected strides "
      "that keep elements apart");
  q_.strides[1] = 8;
  q_.strides[2] = 2;
  expect("q has stride 2 in its last dimension; expected 1");
  q_.strides[2] = 1;
  positions_.strides[0] = 2;
  expect("positions has stride 2 in its last dimension; expected 1");
}

}  // namespace
}  // namespace astrai::kernels
