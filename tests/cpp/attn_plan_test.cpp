#include "kernels/attention/attn_plan.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

#include "common/counters.h"
#include "kernels/attention/attn_dispatch.h"
#include "support/expect_error.h"

namespace astrai::kernels {
namespace {

using testing::expect_error;

TEST(AttnPlan, FillsTheDeviceWithSplitsThatAreLongEnough) {
  // 132 / 3 = 44 would fill the device; 4096 keys make 16 splits of 256.
  EXPECT_EQ(compute_num_splits(1, 3, 4096, 132, 32), 16);
  EXPECT_EQ(compute_num_splits(1, 3, 100000, 132, 64), 44);
  EXPECT_EQ(compute_num_splits(1, 3, 100000, 132, 32), 32);
}

TEST(AttnPlan, DoesNotSplitWhenRequestsAndHeadsFillTheDevice) {
  EXPECT_EQ(compute_num_splits(64, 3, 100000, 132, 32), 1);
  EXPECT_EQ(compute_num_splits(44, 3, 100000, 132, 32), 1);
  EXPECT_EQ(compute_num_splits(43, 3, 100000, 132, 32), 2);
}

TEST(AttnPlan, OneSplitForShortOrNoWork) {
  EXPECT_EQ(compute_num_splits(1, 1, 0, 132, 32), 1);
  EXPECT_EQ(compute_num_splits(1, 1, kMinSplitKeys, 132, 32), 1);
  EXPECT_EQ(compute_num_splits(1, 1, 2 * kMinSplitKeys - 1, 132, 32), 1);
  EXPECT_EQ(compute_num_splits(1, 1, 2 * kMinSplitKeys, 132, 32), 2);
  EXPECT_EQ(compute_num_splits(0, 8, 4096, 132, 32), 1);
}

TEST(AttnPlan, CpuSplitsFollowTheLengthOnly) {
  EXPECT_EQ(compute_num_splits_cpu(0, 100), 1);
  EXPECT_EQ(compute_num_splits_cpu(kMinSplitKeys, 100), 1);
  EXPECT_EQ(compute_num_splits_cpu(kMinSplitKeys + 1, 100), 2);
  EXPECT_EQ(compute_num_splits_cpu(4096, 100), 4096 / kMinSplitKeys);
  EXPECT_EQ(compute_num_splits_cpu(4096, 5), 5);
  EXPECT_EQ(compute_num_splits_cpu(1 << 30, kMaxSplits), kMaxCpuSplits);
}

TEST(AttnPlan, RejectsNumbersThatMakeNoSense) {
  expect_error<std::invalid_argument>(
      "compute_num_splits: num_requests -1, num_kv_heads 1, max_kv_len 1; expected numbers >= 0",
      [] { compute_num_splits(-1, 1, 1, 1, 1); });
  expect_error<std::invalid_argument>(
      "compute_num_splits: parallel_units 0, max_splits 1; expected numbers >= 1",
      [] { compute_num_splits(1, 1, 1, 0, 1); });
  expect_error<std::invalid_argument>(
      "compute_num_splits_cpu: max_kv_len -5; expected a number >= 0",
      [] { compute_num_splits_cpu(-5, 1); });
  expect_error<std::invalid_argument>(
      "compute_num_splits_cpu: max_splits 0; expected a number >= 1",
      [] { compute_num_splits_cpu(5, 0); });
}

TEST(AttnPlan, ScratchPartialsGrowOnceAndAreReused) {
  AttentionParams params{.num_requests = 3, .num_q_heads = 9, .head_dim = 64, .num_splits = 5};
  EXPECT_EQ(o_part_floats(params), 3 * 9 * 5 * 64);
  EXPECT_EQ(ml_part_floats(params), 3 * 9 * 5 * 2);
  AttentionParams first = params;
  alloc_split_partials(first);
  ASSERT_NE(first.o_part, nullptr);
  EXPECT_EQ(first.ml_part, first.o_part + o_part_floats(params));
  for (int64_t i = 0; i < ml_part_floats(params); ++i) first.ml_part[i] = 1.0f;  // all is ours

  const int64_t allocations = counters().host_allocations;
  AttentionParams smaller = params;
  smaller.num_splits = 2;
  alloc_split_partials(smaller);
  EXPECT_EQ(smaller.o_part, first.o_part);
  EXPECT_EQ(counters().host_allocations, allocations);
}

TEST(AttnPlan, KeepsTheCallersPartialsAndNeedsNoneForOneSplit) {
  float o = 0.0f;
  float ml = 0.0f;
  AttentionParams given{.num_requests = 1,
                        .num_q_heads = 1,
                        .head_dim = 32,
                        .num_splits = 2,
                        .o_part = &o,
                        .ml_part = &ml};
  alloc_split_partials(given);
  EXPECT_EQ(given.o_part, &o);
  EXPECT_EQ(given.ml_part, &ml);
  AttentionParams one{.num_requests = 1, .num_q_heads = 1, .head_dim = 32, .num_splits = 1};
  alloc_split_partials(one);
  EXPECT_EQ(one.o_part, nullptr);
}

TEST(AttnDispatch, ReachesEveryListedHeadDimAndNoOther) {
  std::vector<int64_t> listed;
  for_each_head_dim([&](int64_t dim) { listed.push_back(dim); });
  EXPECT_EQ(listed, (std::vector<int64_t>{32, 64, 80, 96, 128, 256}));
  std::vector<int64_t> reached;
  for (int64_t dim = 0; dim <= 512; ++dim) {
    int64_t seen = -1;
    if (dispatch_head_dim(dim, [&]<int D>() { seen = D; })) {
      EXPECT_EQ(seen, dim);
      reached.push_back(dim);
    }
  }
  EXPECT_EQ(reached, listed);
}

}  // namespace
}  // namespace astrai::kernels
