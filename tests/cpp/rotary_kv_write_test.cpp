#include "kernels/rope/rotary_kv_write.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "common/counters.h"
#include "support/expect_error.h"
#include "support/test_random.h"
#include "support/test_target.h"
#include "support/test_tensor.h"

namespace astrai::kernels {
namespace {

using testing::Poison;
using testing::Random;
using testing::TestTarget;
using testing::TestTensor;

struct Case {
  DType dtype = DType::kFloat32;
  int64_t rotary_dim = 64;
  bool interleaved = false;
  bool aligned = true;  // rows at multiples of 16 bytes
  bool wide_positions = true;

  std::string name() const {
    return concat(dtype_name(dtype), " R ", rotary_dim, interleaved ? " interleaved" : "",
                  aligned ? " aligned" : "", wide_positions ? " int64" : " int32");
  }
};

constexpr int64_t kTokens = 9;
constexpr int64_t kQHeads = 6;
constexpr int64_t kKvHeads = 2;
constexpr int64_t kDim = 64;
constexpr int64_t kPages = 5;
constexpr int64_t kPageSize = 4;
constexpr int64_t kMaxPosition = 50;
// Out of order, with skipped tokens and the pool's last slot untouched.
constexpr int64_t kSlots[kTokens] = {5, -1, 9, 0, 18, -1, 3, 12, 7};

// The tensors of one call, the same numbers for every alignment.
struct Tensors {
  TestTensor q, k, v, positions, cos_sin, k_pages, v_pages, slots;

  Tensors(Device device, const Case& test) {
    const int64_t gap = test.aligned ? 8 : 3;
    const auto rows = [&](int64_t heads) {
      const int64_t head = kDim + gap;
      return TestTensor(device, test.dtype, {kTokens, heads, kDim}, {heads * head + gap, head, 1},
                        Poison::kNan);
    };
    q = rows(kQHeads);
    k = rows(kKvHeads);
    v = rows(kKvHeads);
    const int64_t head = kDim + 2 * gap;
    for (TestTensor* pages : {&k_pages, &v_pages}) {
      *pages =
          TestTensor(device, test.dtype, {kPages, kPageSize, kKvHeads, kDim},
                     {kPageSize * kKvHeads * head + gap, kKvHeads * head, head, 1}, Poison::kNan);
    }
    positions = TestTensor(device, test.wide_positions ? DType::kInt64 : DType::kInt32, {kTokens},
                           Poison::kNan);
    slots = TestTensor(device, DType::kInt64, {kTokens}, Poison::kNan);
    cos_sin = TestTensor(device, DType::kFloat32, {kMaxPosition, test.rotary_dim},
                         {test.rotary_dim + (test.aligned ? 4 : 1), 1}, Poison::kNan);
    fill(test);
  }

  void fill(const Case& test) {
    Random random(testing::test_seed());
    for (int64_t t = 0; t < kTokens; ++t) {
      positions.set({t}, static_cast<double>(random.below(kMaxPosition)));
      slots.set({t}, static_cast<double>(kSlots[t]));
      for (int64_t d = 0; d < kDim; ++d) {
        for (int64_t h = 0; h < kQHeads; ++h) q.set({t, h, d}, random.normal());
        for (int64_t h = 0; h < kKvHeads; ++h) {
          k.set({t, h, d}, random.normal());
          v.set({t, h, d}, random.normal());
        }
      }
    }
    for (int64_t p = 0; p < kMaxPosition; ++p) {
      for (int64_t i = 0; i < test.rotary_dim / 2; ++i) {
        const double angle =
            double(p) * std::pow(10000.0, -2.0 * double(i) / double(test.rotary_dim));
        cos_sin.set({p, i}, std::cos(angle));
        cos_sin.set({p, test.rotary_dim / 2 + i}, std::sin(angle));
      }
    }
  }

  void run(const Case& test, bool fused) {
    const TensorView views[] = {q.upload(),         k.upload(),       v.upload(),
                                positions.upload(), cos_sin.upload(), k_pages.upload(),
                                v_pages.upload(),   slots.upload()};
    if (fused) {
      rotary_kv_write(views[0], views[1], views[2], views[3], views[4], test.interleaved, views[5],
                      views[6], views[7], nullptr);
    } else {
      rotary(views[0], &views[1], views[3], views[4], test.interleaved, nullptr);
      kv_write(views[1], views[2], views[5], views[6], views[7], nullptr);
    }
    for (TestTensor* tensor : {&q, &k, &v, &k_pages, &v_pages}) {
      tensor->download();
      EXPECT_TRUE(tensor->surroundings_intact());
    }
  }

  std::vector<std::vector<uint8_t>> bytes() const {
    return {q.element_bytes(), k.element_bytes(), v.element_bytes(), k_pages.element_bytes(),
            v_pages.element_bytes()};
  }
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (int64_t rotary_dim : {0, 2, 16, 20, 32, 64}) {
      for (bool interleaved : {false, true}) {
        for (bool aligned : {false, true}) {
          all.push_back({.dtype = dtype,
                         .rotary_dim = rotary_dim,
                         .interleaved = interleaved,
                         .aligned = aligned,
                         .wide_positions = rotary_dim % 3 == 0});
        }
      }
    }
  }
  return all;
}

TEST(RotaryKvWrite, EqualsRotaryThenKvWrite) {
  for (const TestTarget& target : testing::all_test_targets()) {
    target.activate();
    for (const Case& test : cases()) {
      SCOPED_TRACE(concat(target.name(), " ", test.name(), " seed ", testing::test_seed()));
      Tensors apart(target.device, test);
      Tensors fused(target.device, test);
      apart.run(test, false);
      fused.run(test, true);
      ASSERT_EQ(fused.bytes(), apart.bytes());
    }
  }
}

// rotary_test and kv_write_test compare odd strides with the definition; whole vectors must agree.
TEST(RotaryKvWrite, AlignmentDoesNotChangeABit) {
  for (const TestTarget& target : testing::all_test_targets()) {
    target.activate();
    for (Case test : cases()) {
      if (test.aligned) continue;
      SCOPED_TRACE(concat(target.name(), " ", test.name(), " seed ", testing::test_seed()));
      Tensors odd(target.device, test);
      test.aligned = true;
      Tensors whole(target.device, test);
      odd.run(test, true);
      whole.run(test, true);
      ASSERT_EQ(whole.bytes(), odd.bytes());
    }
  }
}

TEST(RotaryKvWrite, ChecksBothHalvesBeforeAnythingIsTouched) {
  Case test;
  Tensors tensors({}, test);
  const TensorView q = tensors.q.upload();
  const TensorView k = tensors.k.upload();
  const TensorView v = tensors.v.upload();
  const TensorView positions = tensors.positions.upload();
  const TensorView cos_sin = tensors.cos_sin.upload();
  const TensorView k_pages = tensors.k_pages.upload();
  const TensorView v_pages = tensors.v_pages.upload();
  tensors.slots.set({4}, 20);
  const TensorView slots = tensors.slots.upload();
  const std::vector<std::vector<uint8_t>> before = tensors.bytes();
  testing::expect_error<std::invalid_argument>(
      "rotary_kv_write: slot_mapping[4] is 20; expected -1 (skip) or 0 to 19, the slots of k_pages",
      [&] {
        rotary_kv_write(q, k, v, positions, cos_sin, false, k_pages, v_pages, slots, nullptr);
      });
  for (TestTensor* tensor : {&tensors.q, &tensors.k, &tensors.k_pages}) tensor->download();
  EXPECT_EQ(tensors.bytes(), before);
  testing::expect_error<std::invalid_argument>(
      "rotary_kv_write: cos_sin has rotary width 63; expected an even number", [&] {
        TensorView odd = cos_sin;
        odd.shape[1] = 63;
        rotary_kv_write(q, k, v, positions, odd, false, k_pages, v_pages, slots, nullptr);
      });
}

}  // namespace
}  // namespace astrai::kernels
