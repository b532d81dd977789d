#include "runtime/split_partials.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "runtime_test_support.h"

namespace astrai::runtime {
namespace {

TEST(SplitPartials, AreTheWorkspaceSlices) {
  TestWorkspace test(small_shape());
  const SplitPartials partials = split_partials(test.workspace);
  EXPECT_EQ(partials.o_part.data, test.workspace.slice("o_part").data);
  EXPECT_EQ(partials.o_part.shape_string(), "[5, 4, 3, 8]");
  EXPECT_EQ(partials.o_part.dtype, DType::kFloat32);
  EXPECT_EQ(partials.ml_part.data, test.workspace.slice("ml_part").data);
  EXPECT_EQ(partials.ml_part.shape_string(), "[5, 4, 3, 2]");
  EXPECT_EQ(partials.ml_part.dtype, DType::kFloat32);
  EXPECT_EQ(partials.max_splits, 3);
}

TEST(SplitPartials, StayFloat32ForHalfPrecisionModels) {
  WorkspaceShape shape = small_shape();
  shape.dtype = DType::kFloat16;
  TestWorkspace test(shape);
  EXPECT_EQ(split_partials(test.workspace).o_part.dtype, DType::kFloat32);
  EXPECT_EQ(split_partials(test.workspace).ml_part.dtype, DType::kFloat32);
}

TEST(SplitPartials, ViewsAreContiguousPrefixes) {
  TestWorkspace test(small_shape());
  const SplitPartials all = split_partials(test.workspace);
  for (int64_t num_tasks = 1; num_tasks <= 5; ++num_tasks) {
    for (int64_t num_splits = 1; num_splits <= 3; ++num_splits) {
      const SplitPartials some = all.view(num_tasks, num_splits);
      EXPECT_EQ(some.max_splits, num_splits);
      EXPECT_EQ(some.o_part.data, all.o_part.data);
      EXPECT_EQ(some.ml_part.data, all.ml_part.data);
      EXPECT_EQ(some.o_part.shape_string(), concat("[", num_tasks, ", 4, ", num_splits, ", 8]"));
      EXPECT_EQ(some.ml_part.shape_string(), concat("[", num_tasks, ", 4, ", num_splits, ", 2]"));
      EXPECT_TRUE(some.o_part.is_contiguous());
      EXPECT_TRUE(some.ml_part.is_contiguous());
      // Writing the whole view must stay inside the slab; the sanitizer and the guards watch.
      for (int64_t i = 0; i < some.o_part.numel(); ++i) some.o_part.ptr<float>()[i] = 1.0f;
      for (int64_t i = 0; i < some.ml_part.numel(); ++i) some.ml_part.ptr<float>()[i] = 1.0f;
    }
  }
  EXPECT_TRUE(test.buffer.guards_intact());
}

TEST(SplitPartials, RefusesMoreThanTheCapacity) {
  TestWorkspace test(small_shape());
  const SplitPartials partials = split_partials(test.workspace);
  for (int64_t num_tasks : {0, -1, 6}) {
    expect_contains(message_of<std::invalid_argument>([&] { (void)partials.view(num_tasks, 1); }),
                    concat("num_tasks is ", num_tasks, "; expected 1 to 5"));
  }
  for (int64_t num_splits : {0, -1, 4}) {
    expect_contains(message_of<std::invalid_argument>([&] { (void)partials.view(1, num_splits); }),
                    concat("num_splits is ", num_splits, "; expected 1 to 3"));
  }
}

}  // namespace
}  // namespace astrai::runtime
