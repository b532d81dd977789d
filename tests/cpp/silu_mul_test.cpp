#include "kernels/activation/silu_mul.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
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

double exact(double gate, double up) {
  return gate / (1.0 + std::exp(-gate)) * up;
}

void check(const TestTarget& target, int64_t num_rows, int64_t num_columns, DType dtype) {
  SCOPED_TRACE(concat(target.name(), " [", num_rows, ", ", num_columns, "] ", dtype_name(dtype),
                      " seed ", testing::test_seed()));
  target.activate();
  Random random(testing::test_seed());
  TestTensor gate_up(target.device, dtype, {num_rows, 2 * num_columns}, {2 * num_columns + 3, 1},
                     Poison::kNan);
  TestTensor out(target.device, dtype, {num_rows, num_columns}, {num_columns + 7, 1}, Poison::kNan);
  for (int64_t t = 0; t < num_rows; ++t) {
    for (int64_t i = 0; i < 2 * num_columns; ++i) gate_up.set({t, i}, 4.0 * random.normal());
  }
  silu_mul(gate_up.upload(), out.upload(), nullptr);
  out.download();
  ASSERT_TRUE(out.surroundings_intact());
  for (int64_t t = 0; t < num_rows; ++t) {
    for (int64_t i = 0; i < num_columns; ++i) {
      const double expected = exact(gate_up.get({t, i}), gate_up.get({t, num_columns + i}));
      const double tolerance =
          1e-6 * std::abs(expected) + 1.01 * testing::rounding_error(dtype, expected);
      ASSERT_NEAR(out.get({t, i}), expected, tolerance) << "row " << t << " column " << i;
    }
  }
}

TEST(SiluMul, MatchesTheDefinitionInEveryDtypeAndShape) {
  for (const TestTarget& target : testing::test_targets()) {
    for (DType dtype : kFloatTypes) {
      for (int64_t num_columns : {1, 2, 7, 8, 15, 16, 17, 33, 100, 1536}) {
        check(target, 3, num_columns, dtype);
      }
    }
  }
}

TEST(SiluMul, ManyRowsOverThreads) {
  for (const TestTarget& target : testing::test_targets()) {
    check(target, 64, 1536, DType::kBFloat16);
  }
}

TEST(SiluMul, AnElementIsBitwiseTheSameWhereverItStands) {
  constexpr int64_t kColumns = 37;
  for (const TestTarget& target : testing::test_targets()) {
    target.activate();
    Random random(testing::test_seed());
    std::vector<float> row(2 * kColumns);
    for (float& value : row) value = 3.0f * random.normal();
    std::vector<float> out(kColumns);
    silu_mul(TensorView::contiguous(row.data(), DType::kFloat32, {1, 2 * kColumns}),
             TensorView::contiguous(out.data(), DType::kFloat32, {1, kColumns}), nullptr);
    for (size_t i = 0; i < kColumns; ++i) {
      float pair[2] = {row[i], row[kColumns + i]};
      float alone = 0.0f;
      silu_mul(TensorView::contiguous(pair, DType::kFloat32, {1, 2}),
               TensorView::contiguous(&alone, DType::kFloat32, {1, 1}), nullptr);
      ASSERT_EQ(alone, out[i]) << target.name() << " column " << i;
    }
  }
}

TEST(SiluMul, ExtremeGates) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float huge = std::numeric_limits<float>::max();
  std::vector<float> gate_up = {-huge, -1e30f, -200.0f, -88.0f, 0.0f, -0.0f, 100.0f, 1e30f,
                                // up
                                1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f};
  std::vector<float> out(8, infinity);
  for (const TestTarget& target : testing::test_targets()) {
    target.activate();
    silu_mul(TensorView::contiguous(gate_up.data(), DType::kFloat32, {1, 16}),
             TensorView::contiguous(out.data(), DType::kFloat32, {1, 8}), nullptr);
    for (size_t i = 0; i < 4; ++i) EXPECT_NEAR(out[i], 0.0f, 1e-35f) << target.name() << " " << i;
    EXPECT_EQ(out[4], 0.0f);
    EXPECT_EQ(out[5], 0.0f);
    EXPECT_EQ(out[6], 100.0f);
    EXPECT_EQ(out[7], 1e30f);
  }
}

TEST(SiluMul, NanStaysNanInItsOwnLane) {
  std::vector<float> gate_up = {1.0f, std::nanf(""), 1.0f, 1.0f, 1.0f, std::nanf("")};
  std::vector<float> out(3, 0.0f);
  for (const TestTarget& target : testing::test_targets()) {
    target.activate();
    silu_mul(TensorView::contiguous(gate_up.data(), DType::kFloat32, {1, 6}),
             TensorView::contiguous(out.data(), DType::kFloat32, {1, 3}), nullptr);
    EXPECT_FALSE(std::isnan(out[0])) << target.name();
    EXPECT_TRUE(std::isnan(out[1])) << target.name();
    EXPECT_TRUE(std::isnan(out[2])) << target.name();
  }
}

TEST(SiluMul, NothingToDoLaunchesNothing) {
  counters().reset();
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{0, 4}, {3, 0}}) {
    silu_mul(TensorView::contiguous(nullptr, DType::kFloat32, {rows, 2 * columns}),
             TensorView::contiguous(nullptr, DType::kFloat32, {rows, columns}), nullptr);
  }
  EXPECT_EQ(counters().launches.load(), 0);
}

class SiluMulErrors : public ::testing::Test {
 protected:
  void expect(const std::string& text) {
    testing::expect_error<std::invalid_argument>("silu_mul: " + text,
                                                 [&] { silu_mul(gate_up_, out_, nullptr); });
    EXPECT_EQ(memory_, std::vector<float>(128, 1.0f));
  }

  std::vector<float> memory_ = std::vector<float>(128, 1.0f);
  TensorView gate_up_ = TensorView::contiguous(memory_.data(), DType::kFloat32, {2, 8});
  TensorView out_ = TensorView::contiguous(memory_.data() + 64, DType::kFloat32, {2, 4});
};

TEST_F(SiluMulErrors, Shapes) {
  gate_up_ = TensorView::contiguous(memory_.data(), DType::kFloat32, {2, 7});
  expect("gate_up has shape [2, 7]; expected an even number of columns, gate then up");
  gate_up_ = TensorView::contiguous(memory_.data(), DType::kFloat32, {2, 10});
  expect("out has shape [2, 4]; expected 5 in dimension 1, half the columns of gate_up");
  gate_up_ = TensorView::contiguous(memory_.data(), DType::kFloat32, {1, 2, 8});
  expect("gate_up has 3 dimensions (shape [1, 2, 8]); expected 2");
}

TEST_F(SiluMulErrors, DtypesStridesAndOverlap) {
  out_.dtype = DType::kFloat16;
  expect("out has dtype float16; expected float32 as gate_up");
  out_.dtype = DType::kFloat32;
  out_.strides[0] = 3;
  expect(
      "out is written but its elements overlap (a stride of 3 over 4 elements); expected strides "
      "that keep elements apart");
  out_.strides[0] = 4;
  gate_up_.strides[1] = 2;
  expect("gate_up has stride 2 in its last dimension; expected 1");
  gate_up_.strides[1] = 1;
  out_.data = gate_up_.data;
  expect("out overlaps gate_up in memory; expected separate memory");
  out_.device = {.type = DeviceType::kCuda, .index = 0};
  expect("out is on cuda:0; expected cpu, where gate_up is");
}

}  // namespace
}  // namespace astrai::kernels
