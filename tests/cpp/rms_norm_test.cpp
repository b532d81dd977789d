#include "kernels/norm/rms_norm.h"

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

using testing::expect_error;
using testing::kFloatTypes;
using testing::Poison;
using testing::Random;
using testing::rounded_to;
using testing::TestTarget;
using testing::TestTensor;

struct Case {
  int64_t num_rows;
  int64_t num_columns;
  DType dtype;
  bool with_residual = false;
  bool in_place = false;
  int64_t row_gap = 0;  // poisoned elements between rows
  float eps = 1e-5f;
  float weight_offset = 0.0f;

  std::string name() const {
    return concat("[", num_rows, ", ", num_columns, "] ", dtype_name(dtype),
                  with_residual ? " residual" : "", in_place ? " in place" : "", " gap ", row_gap);
  }
};

TestTensor random_rows(const TestTarget& target, const Case& test, int64_t extra_gap,
                       Random& random) {
  const std::vector<int64_t> shape = {test.num_rows, test.num_columns};
  TestTensor tensor(target.device, test.dtype, shape,
                    {test.num_columns + test.row_gap + extra_gap, 1}, Poison::kNan);
  for (int64_t t = 0; t < test.num_rows; ++t) {
    for (int64_t i = 0; i < test.num_columns; ++i) tensor.set({t, i}, random.normal());
  }
  return tensor;
}

// Runs the case on one target and compares every element with the definition in double precision.
void check(const TestTarget& target, const Case& test) {
  SCOPED_TRACE(target.name() + " " + test.name() + concat(" seed ", testing::test_seed()));
  target.activate();
  Random random(testing::test_seed());
  TestTensor x = random_rows(target, test, 0, random);
  TestTensor residual = random_rows(target, test, 3, random);
  TestTensor weight(target.device, test.dtype, {test.num_columns}, Poison::kNan);
  for (int64_t i = 0; i < test.num_columns; ++i) weight.set({i}, random.normal());
  TestTensor out(target.device, test.dtype, {test.num_rows, test.num_columns},
                 {test.num_columns + 2 * test.row_gap, 1}, Poison::kNan);
  const TestTensor old_x = x;
  const TestTensor old_residual = residual;

  const TensorView x_view = x.upload();
  const TensorView residual_view = residual.upload();
  const TensorView out_view = test.in_place ? x_view : out.upload();
  rms_norm(x_view, weight.upload(), out_view, test.with_residual ? &residual_view : nullptr,
           test.eps, test.weight_offset, nullptr);
  x.download();
  residual.download();
  if (!test.in_place) out.download();
  TestTensor& result = test.in_place ? x : out;

  ASSERT_TRUE(x.surroundings_intact());
  ASSERT_TRUE(residual.surroundings_intact());
  ASSERT_TRUE(result.surroundings_intact());
  for (int64_t t = 0; t < test.num_rows; ++t) {
    std::vector<double> row;
    double sum = 0.0;
    for (int64_t i = 0; i < test.num_columns; ++i) {
      double value = old_x.get({t, i});
      if (test.with_residual) {
        value = rounded_to(
            test.dtype, static_cast<float>(value) + static_cast<float>(old_residual.get({t, i})));
        ASSERT_EQ(residual.get({t, i}), value) << "row " << t << " column " << i;
      } else {
        ASSERT_EQ(residual.get({t, i}), old_residual.get({t, i}));
      }
      row.push_back(value);
      sum += value * value;
    }
    const double mean = sum / static_cast<double>(test.num_columns);
    for (int64_t i = 0; i < test.num_columns; ++i) {
      const double gain = weight.get({i}) + static_cast<double>(test.weight_offset);
      const double expected =
          row[static_cast<size_t>(i)] / std::sqrt(mean + static_cast<double>(test.eps)) * gain;
      const double tolerance =
          2e-6 * std::abs(expected) + 1.01 * testing::rounding_error(test.dtype, expected);
      ASSERT_NEAR(result.get({t, i}), expected, tolerance) << "row " << t << " column " << i;
    }
  }
}

TEST(RmsNorm, MatchesTheDefinitionInEveryDtypeAndShape) {
  for (const TestTarget& target : testing::test_targets()) {
    for (DType dtype : kFloatTypes) {
      for (int64_t num_columns : {1, 3, 7, 8, 16, 31, 33, 63, 64, 65, 100, 576, 1537}) {
        check(target, {.num_rows = 3, .num_columns = num_columns, .dtype = dtype, .row_gap = 5});
      }
    }
  }
}

TEST(RmsNorm, AddsAndKeepsTheResidual) {
  for (const TestTarget& target : testing::test_targets()) {
    for (DType dtype : kFloatTypes) {
      for (int64_t num_columns : {1, 5, 16, 29, 576}) {
        for (bool in_place : {false, true}) {
          check(target, {.num_rows = 4,
                         .num_columns = num_columns,
                         .dtype = dtype,
                         .with_residual = true,
                         .in_place = in_place,
                         .row_gap = 1});
        }
      }
    }
  }
}

TEST(RmsNorm, WorksInPlace) {
  for (const TestTarget& target : testing::test_targets()) {
    check(target, {.num_rows = 2, .num_columns = 77, .dtype = DType::kBFloat16, .in_place = true});
  }
}

TEST(RmsNorm, AddsTheWeightOffset) {
  for (const TestTarget& target : testing::test_targets()) {
    check(target, {.num_rows = 2, .num_columns = 70, .dtype = DType::kFloat32, .weight_offset = 1});
  }
}

TEST(RmsNorm, ManyRowsOverThreads) {
  for (const TestTarget& target : testing::test_targets()) {
    check(target, {.num_rows = 300, .num_columns = 576, .dtype = DType::kBFloat16});
  }
}

TEST(RmsNorm, ARowOfZerosStaysZero) {
  for (const TestTarget& target : testing::test_targets()) {
    target.activate();
    std::vector<float> x(20, 0.0f);
    std::vector<float> weight(20, 2.0f);
    std::vector<float> out(20, 7.0f);
    rms_norm(TensorView::contiguous(x.data(), DType::kFloat32, {1, 20}),
             TensorView::contiguous(weight.data(), DType::kFloat32, {20}),
             TensorView::contiguous(out.data(), DType::kFloat32, {1, 20}), nullptr, 1e-5f, 0.0f,
             nullptr);
    EXPECT_EQ(out, std::vector<float>(20, 0.0f)) << target.name();
  }
}

TEST(RmsNorm, NothingToDoLaunchesNothing) {
  float weight[4] = {};
  counters().reset();
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{0, 4}, {3, 0}}) {
    const TensorView empty = TensorView::contiguous(nullptr, DType::kFloat32, {rows, columns});
    rms_norm(empty, TensorView::contiguous(weight, DType::kFloat32, {columns}), empty, nullptr,
             1e-5f, 0.0f, nullptr);
  }
  EXPECT_EQ(counters().launches.load(), 0);
}

TEST(RmsNorm, CountsOneLaunch) {
  float values[8] = {1, 2, 3, 4};
  counters().reset();
  const TensorView x = TensorView::contiguous(values, DType::kFloat32, {1, 4});
  rms_norm(x, TensorView::contiguous(values + 4, DType::kFloat32, {4}), x, nullptr, 0.0f, 0.0f,
           nullptr);
  EXPECT_EQ(counters().launches.load(), 1);
}

class RmsNormErrors : public ::testing::Test {
 protected:
  void expect(const std::string& text) {
    expect_error<std::invalid_argument>("rms_norm: " + text, [&] {
      rms_norm(x_, weight_, out_, with_residual_ ? &residual_ : nullptr, eps_, offset_, nullptr);
    });
  }

  std::vector<float> memory_ = std::vector<float>(256, 1.0f);
  TensorView x_ = TensorView::contiguous(memory_.data(), DType::kFloat32, {2, 8});
  TensorView weight_ = TensorView::contiguous(memory_.data() + 32, DType::kFloat32, {8});
  TensorView out_ = TensorView::contiguous(memory_.data() + 64, DType::kFloat32, {2, 8});
  TensorView residual_ = TensorView::contiguous(memory_.data() + 128, DType::kFloat32, {2, 8});
  bool with_residual_ = false;
  float eps_ = 1e-5f;
  float offset_ = 0.0f;
};

TEST_F(RmsNormErrors, Shapes) {
  x_ = TensorView::contiguous(memory_.data(), DType::kFloat32, {16});
  expect("x has 1 dimensions (shape [16]); expected 2");
  x_ = TensorView::contiguous(memory_.data(), DType::kFloat32, {2, 7});
  expect("weight has shape [8]; expected 7 in dimension 0, the columns of x");
  x_ = TensorView::contiguous(memory_.data(), DType::kFloat32, {3, 8});
  expect("out has shape [2, 8]; expected 3 in dimension 0, the rows of x");
}

TEST_F(RmsNormErrors, DtypesAndDevices) {
  weight_.dtype = DType::kBFloat16;
  expect("weight has dtype bfloat16; expected float32 as x");
  weight_.dtype = DType::kFloat32;
  out_.device = {.type = DeviceType::kCuda, .index = 1};
  expect("out is on cuda:1; expected cpu, where x is");
  x_.dtype = DType::kInt32;
  expect("x has dtype int32; expected one of float32, float16, bfloat16");
}

TEST_F(RmsNormErrors, Strides) {
  x_.strides[1] = 2;
  expect("x has stride 2 in its last dimension; expected 1");
  x_.strides[1] = 1;
  out_.strides[0] = 0;
  expect(
      "out is written but its elements overlap (a stride of 0 over 1 elements); expected strides "
      "that keep elements apart");
}

TEST_F(RmsNormErrors, Overlap) {
  out_.data = memory_.data() + 4;
  expect("out overlaps x in memory; expected separate memory, or the very same tensor");
  out_.data = memory_.data() + 30;
  expect("out overlaps weight in memory; expected separate memory");
  out_.data = memory_.data() + 64;
  with_residual_ = true;
  residual_.data = x_.data;
  expect("residual overlaps x in memory; expected separate memory");
}

TEST_F(RmsNormErrors, Numbers) {
  eps_ = -1.0f;
  expect("eps is -1; expected a finite number >= 0");
  eps_ = std::numeric_limits<float>::quiet_NaN();
  expect("eps is nan; expected a finite number >= 0");
  eps_ = 0.0f;
  offset_ = std::numeric_limits<float>::infinity();
  expect("weight_offset is inf; expected a finite number");
}

TEST_F(RmsNormErrors, NothingIsWritten) {
  with_residual_ = true;
  eps_ = -1.0f;
  expect("eps is -1; expected a finite number >= 0");
  EXPECT_EQ(memory_, std::vector<float>(256, 1.0f));
}

TEST(RmsNormCuda, ReportsThatItIsNotBuilt) {
  if (testing::test_targets().back().device.type == DeviceType::kCuda) {
    GTEST_SKIP() << "this build has the CUDA kernel";
  }
  float values[4] = {};
  const Device device = {.type = DeviceType::kCuda, .index = 0};
  const TensorView x = TensorView::contiguous(values, DType::kFloat32, {1, 2}, device);
  const TensorView weight = TensorView::contiguous(values + 2, DType::kFloat32, {2}, device);
  EXPECT_THROW(rms_norm(x, weight, x, nullptr, 0.0f, 0.0f, nullptr), std::runtime_error);
}

}  // namespace
}  // namespace astrai::kernels
