#include "kernels/linear/linear.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "common/counters.h"
#include "common/thread_pool.h"
#include "support/expect_error.h"
#include "support/test_random.h"
#include "support/test_target.h"
#include "support/test_tensor.h"
#include "support/tolerance.h"

namespace astrai::kernels {
namespace {

using testing::Poison;
using testing::Random;
using testing::TestTarget;
using testing::TestTensor;

// Every combination of dtypes that the kernel takes.
struct Types {
  DType weight, x, out;
};
constexpr Types kTypes[] = {
    {DType::kFloat32, DType::kFloat32, DType::kFloat32},
    {DType::kFloat16, DType::kFloat16, DType::kFloat16},
    {DType::kFloat16, DType::kFloat16, DType::kFloat32},
    {DType::kFloat16, DType::kFloat32, DType::kFloat32},
    {DType::kBFloat16, DType::kBFloat16, DType::kBFloat16},
    {DType::kBFloat16, DType::kBFloat16, DType::kFloat32},
    {DType::kBFloat16, DType::kFloat32, DType::kFloat32},
};

struct Case {
  int64_t num_rows = 1;
  int64_t num_outputs = 1;
  int64_t num_inputs = 1;
  Types types = kTypes[0];
  bool with_bias = false;
  int64_t gap = 0;             // poisoned elements between rows
  bool whole_numbers = false;  // small ones, so that float32 sums are exact

  std::string name() const {
    return concat("M ", num_rows, " N ", num_outputs, " K ", num_inputs, " ",
                  dtype_name(types.weight), " ", dtype_name(types.x), " ", dtype_name(types.out),
                  with_bias ? " bias" : "", " gap ", gap, " seed ", testing::test_seed());
  }
};

struct Tensors {
  TestTensor x, weight, bias, out;
};

double draw(const Case& test, Random& random) {
  return test.whole_numbers ? static_cast<double>(random.below(9) - 4) : random.normal();
}

Tensors make_tensors(const TestTarget& target, const Case& test) {
  Random random(testing::test_seed());
  const auto make = [&](DType dtype, int64_t rows, int64_t columns, int64_t gap) {
    return TestTensor(target.device, dtype, {rows, columns}, {columns + gap, 1}, Poison::kNan);
  };
  Tensors tensors = {
      .x = make(test.types.x, test.num_rows, test.num_inputs, test.gap),
      .weight = make(test.types.weight, test.num_outputs, test.num_inputs, 2 * test.gap),
      .bias = TestTensor(target.device, test.types.weight, {test.num_outputs}, Poison::kNan),
      .out = make(test.types.out, test.num_rows, test.num_outputs, 3 * test.gap)};
  for (int64_t m = 0; m < test.num_rows; ++m) {
    for (int64_t k = 0; k < test.num_inputs; ++k) tensors.x.set({m, k}, draw(test, random));
  }
  for (int64_t n = 0; n < test.num_outputs; ++n) {
    for (int64_t k = 0; k < test.num_inputs; ++k) tensors.weight.set({n, k}, draw(test, random));
    tensors.bias.set({n}, draw(test, random));
  }
  return tensors;
}

void run(Tensors& tensors, bool with_bias) {
  const TensorView bias = tensors.bias.upload();
  linear(tensors.x.upload(), tensors.weight.upload(), with_bias ? &bias : nullptr,
         tensors.out.upload(), nullptr);
  tensors.out.download();
}

void check(const TestTarget& target, const Case& test) {
  SCOPED_TRACE(target.name() + " " + test.name());
  target.activate();
  Tensors tensors = make_tensors(target, test);
  run(tensors, test.with_bias);
  ASSERT_TRUE(tensors.out.surroundings_intact());
  for (int64_t m = 0; m < test.num_rows; ++m) {
    for (int64_t n = 0; n < test.num_outputs; ++n) {
      double expected = test.with_bias ? tensors.bias.get({n}) : 0.0;
      double magnitude = std::abs(expected);
      for (int64_t k = 0; k < test.num_inputs; ++k) {
        const double product = tensors.x.get({m, k}) * tensors.weight.get({n, k});
        expected += product;
        magnitude += std::abs(product);
      }
      const double found = tensors.out.get({m, n});
      if (test.whole_numbers) {
        ASSERT_EQ(found, testing::rounded_to(test.types.out, expected)) << "[" << m << ", " << n;
      } else {
        const double tolerance =
            1e-6 * magnitude + 1.01 * testing::rounding_error(test.types.out, expected);
        ASSERT_NEAR(found, expected, tolerance) << "[" << m << ", " << n << "]";
      }
    }
  }
}

TEST(Linear, EveryNumberOfRowsAndTail) {
  for (const TestTarget& target : testing::test_targets()) {
    for (const Types& types : kTypes) {
      for (int64_t num_rows = 1; num_rows <= 14; ++num_rows) {
        for (int64_t num_inputs : {1, 15, 16, 31, 33, 64, 95}) {
          check(target, {.num_rows = num_rows,
                         .num_outputs = 12 + num_rows,
                         .num_inputs = num_inputs,
                         .types = types,
                         .gap = num_rows % 3,
                         .whole_numbers = true});
        }
      }
    }
  }
}

TEST(Linear, EveryNumberOfOutputs) {
  for (const TestTarget& target : testing::test_targets()) {
    for (const Types& types : kTypes) {
      for (int64_t num_outputs = 1; num_outputs <= 40; ++num_outputs) {
        check(target, {.num_rows = 1 + num_outputs % 7,
                       .num_outputs = num_outputs,
                       .num_inputs = 40,
                       .types = types,
                       .with_bias = num_outputs % 2 == 0,
                       .gap = 1,
                       .whole_numbers = true});
      }
    }
  }
}

TEST(Linear, RealNumbersStayWithinFloat32Error) {
  for (const TestTarget& target : testing::test_targets()) {
    for (const Types& types : kTypes) {
      for (int64_t num_rows : {1, 5, 40}) {
        check(target, {.num_rows = num_rows,
                       .num_outputs = 75,
                       .num_inputs = 577,
                       .types = types,
                       .with_bias = true,
                       .gap = 3});
      }
    }
  }
}

TEST(Linear, WideLayersOverThreads) {
  for (const TestTarget& target : testing::test_targets()) {
    for (const Types& types : {kTypes[0], kTypes[5]}) {
      check(target, {.num_rows = 2, .num_outputs = 1100, .num_inputs = 320, .types = types});
      check(target, {.num_rows = 70, .num_outputs = 301, .num_inputs = 64, .types = types});
    }
  }
}

TEST(Linear, NoInputsGiveTheBias) {
  for (const TestTarget& target : testing::test_targets()) {
    for (bool with_bias : {false, true}) {
      check(target, {.num_rows = 3,
                     .num_outputs = 5,
                     .num_inputs = 0,
                     .types = kTypes[4],
                     .with_bias = with_bias,
                     .whole_numbers = true});
    }
  }
}

TEST(Linear, NothingToDoLaunchesNothing) {
  float values[8] = {};
  counters().reset();
  linear(TensorView::contiguous(nullptr, DType::kFloat32, {0, 4}),
         TensorView::contiguous(values, DType::kFloat32, {2, 4}), nullptr,
         TensorView::contiguous(nullptr, DType::kFloat32, {0, 2}), nullptr);
  linear(TensorView::contiguous(values, DType::kFloat32, {2, 4}),
         TensorView::contiguous(nullptr, DType::kFloat32, {0, 4}), nullptr,
         TensorView::contiguous(nullptr, DType::kFloat32, {2, 0}), nullptr);
  EXPECT_EQ(counters().launches.load(), 0);
}

// The bytes of out[m] when rows [first, first + count) are computed in one call.
std::vector<std::vector<uint8_t>> rows_of_call(const Tensors& all, const Case& test, int64_t first,
                                               int64_t count) {
  Tensors part = all;
  TensorView x = part.x.upload();
  x.data = static_cast<uint8_t*>(x.data) + first * x.strides[0] * dtype_bytes(x.dtype);
  x.shape[0] = count;
  TensorView out = part.out.upload();
  out.shape[0] = count;
  const TensorView bias = part.bias.upload();
  linear(x, part.weight.upload(), test.with_bias ? &bias : nullptr, out, nullptr);
  std::vector<std::vector<uint8_t>> rows;
  const int64_t item = dtype_bytes(out.dtype);
  for (int64_t m = 0; m < count; ++m) {
    const uint8_t* row = static_cast<uint8_t*>(out.data) + m * out.strides[0] * item;
    rows.emplace_back(row, row + test.num_outputs * item);
  }
  return rows;
}

// The engine's determinism rests on this: a request's numbers do not change with its neighbours.
TEST(Linear, ARowIsBitwiseTheSameWhateverElseIsInTheCall) {
  const int saved_threads = num_threads();
  for (const TestTarget& target : testing::test_targets()) {
    target.activate();
    for (const Types& types : kTypes) {
      const Case test = {.num_rows = 31,
                         .num_outputs = 173,
                         .num_inputs = 203,
                         .types = types,
                         .with_bias = true,
                         .gap = 2};
      SCOPED_TRACE(target.name() + " " + test.name());
      const Tensors tensors = make_tensors(target, test);
      set_num_threads(1);
      const auto all = rows_of_call(tensors, test, 0, test.num_rows);
      for (int threads : {1, 2, 3}) {
        set_num_threads(threads);
        for (int64_t count = 1; count <= test.num_rows; count += count < 14 ? 1 : 4) {
          const int64_t first = (count * 5) % (test.num_rows - count + 1);
          const auto rows = rows_of_call(tensors, test, first, count);
          for (int64_t m = 0; m < count; ++m) {
            ASSERT_EQ(rows[static_cast<size_t>(m)], all[static_cast<size_t>(first + m)])
                << "row " << first + m << " in a call of " << count << ", " << threads
                << " threads";
          }
        }
      }
    }
  }
  set_num_threads(saved_threads);
}

// An output depends on its own weight row only, not on which others are stored with it.
TEST(Linear, AnOutputIsBitwiseTheSameInASlicedWeight) {
  for (const TestTarget& target : testing::test_targets()) {
    target.activate();
    const Case test = {.num_rows = 5, .num_outputs = 61, .num_inputs = 130, .types = kTypes[5]};
    Tensors tensors = make_tensors(target, test);
    run(tensors, false);
    for (int64_t first : {1, 13, 60}) {
      Tensors part = tensors;
      TensorView weight = part.weight.upload();
      weight.data = weight.ptr<bf16>() + first * weight.strides[0];
      weight.shape[0] -= first;
      TensorView out = part.out.upload();
      out.shape[1] -= first;
      linear(part.x.upload(), weight, nullptr, out, nullptr);
      for (int64_t m = 0; m < test.num_rows; ++m) {
        for (int64_t n = 0; n < weight.shape[0]; ++n) {
          ASSERT_EQ(out.ptr<float>()[m * out.strides[0] + n], tensors.out.get({m, first + n}))
              << target.name() << " [" << m << ", " << first + n << "]";
        }
      }
    }
  }
}

TEST(Linear, InfinitiesAndNansStayInTheirRowsAndOutputs) {
  for (const TestTarget& target : testing::test_targets()) {
    target.activate();
    const Case test = {.num_rows = 4, .num_outputs = 20, .num_inputs = 37, .types = kTypes[4]};
    Tensors tensors = make_tensors(target, test);
    tensors.x.set({1, 36}, std::numeric_limits<double>::infinity());
    tensors.weight.set({7, 0}, std::numeric_limits<double>::quiet_NaN());
    run(tensors, false);
    for (int64_t m = 0; m < 4; ++m) {
      for (int64_t n = 0; n < 20; ++n) {
        const double value = tensors.out.get({m, n});
        if (n == 7) {
          EXPECT_TRUE(std::isnan(value)) << target.name();
        } else {
          EXPECT_EQ(std::isfinite(value), m != 1) << target.name() << " " << m << ", " << n;
        }
      }
    }
  }
}

TEST(Linear, ReversedRowsByNegativeStrides) {
  for (const TestTarget& target : testing::test_targets()) {
    target.activate();
    std::vector<float> x = {1, 2, 3, 4};
    std::vector<float> weight = {1, 0, 0, 1};
    std::vector<float> out(4, 0.0f);
    TensorView x_view = TensorView::contiguous(x.data() + 2, DType::kFloat32, {2, 2});
    x_view.strides[0] = -2;
    linear(x_view, TensorView::contiguous(weight.data(), DType::kFloat32, {2, 2}), nullptr,
           TensorView::contiguous(out.data(), DType::kFloat32, {2, 2}), nullptr);
    EXPECT_EQ(out, (std::vector<float>{3, 4, 1, 2})) << target.name();
  }
}

TEST(Linear, OneRowReadManyTimesByStrideZero) {
  for (const TestTarget& target : testing::test_targets()) {
    target.activate();
    std::vector<float> x = {1, 2};
    std::vector<float> weight = {3, 4};
    std::vector<float> out(3, 0.0f);
    TensorView x_view = TensorView::contiguous(x.data(), DType::kFloat32, {3, 2});
    x_view.strides[0] = 0;
    linear(x_view, TensorView::contiguous(weight.data(), DType::kFloat32, {1, 2}), nullptr,
           TensorView::contiguous(out.data(), DType::kFloat32, {3, 1}), nullptr);
    EXPECT_EQ(out, (std::vector<float>{11, 11, 11})) << target.name();
  }
}

class LinearErrors : public ::testing::Test {
 protected:
  void expect(const std::string& text) {
    testing::expect_error<std::invalid_argument>("linear: " + text, [&] {
      linear(x_, weight_, with_bias_ ? &bias_ : nullptr, out_, nullptr);
    });
    EXPECT_EQ(memory_, std::vector<float>(256, 1.0f));
  }

  std::vector<float> memory_ = std::vector<float>(256, 1.0f);
  TensorView x_ = TensorView::contiguous(memory_.data(), DType::kFloat32, {2, 8});
  TensorView weight_ = TensorView::contiguous(memory_.data() + 32, DType::kFloat32, {4, 8});
  TensorView bias_ = TensorView::contiguous(memory_.data() + 80, DType::kFloat32, {4});
  TensorView out_ = TensorView::contiguous(memory_.data() + 128, DType::kFloat32, {2, 4});
  bool with_bias_ = false;
};

TEST_F(LinearErrors, Shapes) {
  x_ = TensorView::contiguous(memory_.data(), DType::kFloat32, {2, 7});
  expect("x has shape [2, 7]; expected 8 in dimension 1, the columns of weight");
  x_ = TensorView::contiguous(memory_.data(), DType::kFloat32, {3, 8});
  expect("out has shape [2, 4]; expected 3 in dimension 0, the rows of x");
  x_ = TensorView::contiguous(memory_.data(), DType::kFloat32, {2, 8});
  out_ = TensorView::contiguous(memory_.data() + 128, DType::kFloat32, {2, 5});
  expect("out has shape [2, 5]; expected 4 in dimension 1, the rows of weight");
  x_ = TensorView::contiguous(memory_.data(), DType::kFloat32, {8});
  expect("x has 1 dimensions (shape [8]); expected 2");
  x_ = TensorView::contiguous(memory_.data(), DType::kFloat32, {2, 8});
  out_ = TensorView::contiguous(memory_.data() + 128, DType::kFloat32, {2, 4});
  with_bias_ = true;
  bias_.shape[0] = 3;
  expect("bias has shape [3]; expected 4 in dimension 0, the rows of weight");
}

TEST_F(LinearErrors, Dtypes) {
  x_.dtype = DType::kBFloat16;
  expect("x has dtype bfloat16; expected float32 as weight");
  weight_.dtype = DType::kFloat16;
  expect("x has dtype bfloat16; expected float16 as weight, or float32");
  weight_.dtype = DType::kFloat32;
  x_.dtype = DType::kFloat32;
  out_.dtype = DType::kBFloat16;
  expect("out has dtype bfloat16; expected float32 as x");
  out_.dtype = DType::kFloat32;
  weight_.dtype = DType::kUInt8;
  expect("weight has dtype uint8; expected one of float32, float16, bfloat16");
  weight_.dtype = DType::kFloat16;
  with_bias_ = true;
  expect("bias has dtype float32; expected float16 as weight");
}

TEST_F(LinearErrors, DevicesStridesAndOverlap) {
  weight_.device = {.type = DeviceType::kCuda, .index = 0};
  expect("weight is on cuda:0; expected cpu, where x is");
  weight_.device = {};
  weight_.strides[1] = 2;
  expect("weight has stride 2 in its last dimension; expected 1");
  weight_.strides[1] = 1;
  out_.strides[0] = 3;
  expect(
      "out is written but its elements overlap (a stride of 3 over 4 elements); expected strides "
      "that keep elements apart");
  out_.strides[0] = 4;
  out_.data = memory_.data() + 12;
  expect("out overlaps x in memory; expected separate memory");
  out_.data = memory_.data() + 60;
  expect("out overlaps weight in memory; expected separate memory");
}

}  // namespace
}  // namespace astrai::kernels
