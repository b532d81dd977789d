#include "kernels/attention/attn_cuda_plan.h"

#include <gtest/gtest.h>

#include <bit>
#include <limits>
#include <stdexcept>

#include "support/expect_error.h"

namespace astrai::kernels {
namespace {

using testing::expect_error;

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();
const DecodeDeviceFacts kBig{.num_sms = 132,
                             .blocks_per_sm = 2,
                             .block_tile_keys = 64,
                             .active_clusters = {264, 132, 64, 32, 7}};
const DecodeDeviceFacts kNoClusters{.num_sms = 108, .blocks_per_sm = 1, .block_tile_keys = 64};

TEST(PlanDecode, ShortRequestsAreOneCluster) {
  const DecodePlan plan = plan_decode(kBig, {.num_units = 8, .kv_len = 512}, kUnlimited);
  EXPECT_EQ(plan.num_splits, 8);
  EXPECT_EQ(plan.cluster_size, 8);
  EXPECT_EQ(plan.num_partials(), 1);
  EXPECT_EQ(plan.min_split_keys, 64);
}

TEST(PlanDecode, LongRequestsFillTheDevice) {
  const DecodePlan plan = plan_decode(kBig, {.num_units = 8, .kv_len = 100000}, kUnlimited);
  EXPECT_EQ(plan.num_splits, 33);
  EXPECT_EQ(plan.num_partials(), 33);
}

TEST(PlanDecode, ClustersNeverOutnumberTheMultiprocessors) {
  for (int64_t units = 1; units < 200; ++units) {
    for (int64_t kv_len : {1, 100, 1000, 4000, 8000}) {
      const DecodePlan plan = plan_decode(kBig, {.num_units = units, .kv_len = kv_len}, kUnlimited);
      if (plan.cluster_size > 1) {
        EXPECT_LE(units * plan.num_splits, kBig.num_sms);
        const auto size_index = std::countr_zero(static_cast<uint64_t>(plan.cluster_size));
        EXPECT_LE(units, kBig.active_clusters.at(static_cast<size_t>(size_index)));
      }
    }
  }
}

TEST(PlanDecode, AClusterSizeThatDoesNotFitIsNotUsed) {
  // Eight units of 16 blocks do not fit in seven clusters, and splits of 512 keys are too long.
  EXPECT_EQ(plan_decode(kBig, {.num_units = 8, .kv_len = 4096}, kUnlimited).cluster_size, 1);
  EXPECT_EQ(plan_decode(kBig, {.num_units = 4, .kv_len = 4096}, kUnlimited).cluster_size, 16);
  EXPECT_EQ(plan_decode(kBig, {.num_units = 8, .kv_len = 2048}, kUnlimited).cluster_size, 8);
}

TEST(PlanDecode, SplitsOfManyBytesAreNotInClusters) {
  const auto cluster = [](int64_t kv_len, int64_t key_bytes) {
    const DecodeBatch batch{.num_units = 4, .kv_len = kv_len, .key_bytes = key_bytes};
    return plan_decode(kBig, batch, kUnlimited).cluster_size;
  };
  EXPECT_EQ(cluster(4096, 512), 16);   // 256 keys each, 128 KB
  EXPECT_EQ(cluster(4096, 1024), 1);   // 256 KB
  EXPECT_EQ(cluster(2048, 1024), 16);  // 128 KB again
}

TEST(PlanDecode, AFullDeviceIsNotSplit) {
  const DecodePlan plan = plan_decode(kBig, {.num_units = 512, .kv_len = 4096}, kUnlimited);
  EXPECT_EQ(plan.num_splits, 1);
  EXPECT_EQ(plan.cluster_size, 1);
}

TEST(PlanDecode, WithoutClustersEverySplitIsAPartial) {
  const DecodePlan plan = plan_decode(kNoClusters, {.num_units = 8, .kv_len = 4096}, kUnlimited);
  EXPECT_EQ(plan.num_splits, 13);
  EXPECT_EQ(plan.num_partials(), 13);
}

TEST(PlanDecode, StaysWithinTheGivenPartials) {
  for (int64_t capacity : {1, 2, 3, 7}) {
    for (const DecodeDeviceFacts& device : {kBig, kNoClusters}) {
      for (int64_t units : {1, 3, 8, 100, 10000}) {
        for (int64_t kv_len : {0, 1, 64, 5000, 1 << 20}) {
          const DecodePlan plan =
              plan_decode(device, {.num_units = units, .kv_len = kv_len}, capacity);
          EXPECT_GE(plan.num_splits, 1);
          EXPECT_EQ(plan.num_splits % plan.cluster_size, 0);
          EXPECT_LE(plan.num_partials(), capacity);
        }
      }
    }
  }
}

TEST(PlanDecode, FixedSplitsDependOnTheBoundOnlyInTheirNumber) {
  const DecodePlan small = plan_decode_fixed(kBig, {.num_units = 8, .max_kv_len = 600}, 256, 100);
  const DecodePlan large =
      plan_decode_fixed(kBig, {.num_units = 900, .max_kv_len = 10000}, 256, 100);
  EXPECT_EQ(small.min_split_keys, 256);
  EXPECT_EQ(large.min_split_keys, 256);
  EXPECT_EQ(small.cluster_size, 1);
  EXPECT_EQ(large.cluster_size, 1);
  EXPECT_GE(small.num_splits * 256, 600);
  EXPECT_GE(large.num_splits * 256, 10000);
}

TEST(PlanDecode, FixedSplitsNeedRoom) {
  expect_error<std::invalid_argument>(
      "plan_decode: fixed splits of 256 keys need 40 partials for 10000 keys; expected at most the "
      "39 that there is room for",
      [] { plan_decode_fixed(kBig, {.num_units = 8, .max_kv_len = 10000}, 256, 39); });
  expect_error<std::invalid_argument>(
      "plan_decode: fixed split of 100 keys; expected a multiple of 64",
      [] { plan_decode_fixed(kBig, {.num_units = 8, .max_kv_len = 10000}, 100, 9); });
}

TEST(PlanDecode, AGivenNumberIsKept) {
  for (int64_t splits : {1, 2, 3, 7, 24, 50, 256}) {
    const DecodePlan plan = plan_decode_given(kBig, {.num_units = 4}, splits);
    EXPECT_EQ(plan.num_splits, splits);
    EXPECT_EQ(splits % plan.cluster_size, 0);
  }
  EXPECT_EQ(plan_decode_given(kBig, {.num_units = 4}, 24).cluster_size, 8);
  EXPECT_EQ(plan_decode_given(kBig, {.num_units = 8}, 16).cluster_size, 8);
  EXPECT_EQ(plan_decode_given(kBig, {.num_units = 100}, 24).cluster_size, 1);
  EXPECT_EQ(plan_decode_given(kNoClusters, {}, 24).cluster_size, 1);
}

TEST(PlanDecode, RefusesNonsense) {
  EXPECT_THROW(plan_decode({.num_sms = 0}, {}, 1), std::invalid_argument);
  EXPECT_THROW(plan_decode(kBig, {.num_units = 0}, 1), std::invalid_argument);
  EXPECT_THROW(plan_decode(kBig, {}, 0), std::invalid_argument);
  EXPECT_THROW(plan_decode_given(kBig, {}, 0), std::invalid_argument);
}

}  // namespace
}  // namespace astrai::kernels
