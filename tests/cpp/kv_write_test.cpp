#include "kernels/kv_cache/kv_write.h"

#include <gtest/gtest.h>

#include <set>
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

struct Case {
  int64_t num_pages = 5;
  int64_t page_size = 4;
  int64_t num_kv_heads = 3;
  int64_t head_dim = 8;
  DType dtype = DType::kFloat32;
  std::vector<int64_t> slots = {};
  bool heads_first = false;  // pages lie as [P, Hkv, S, D] in memory
  int64_t gap = 0;           // poisoned elements between heads of the new rows

  std::string name() const {
    return concat("P ", num_pages, " S ", page_size, " H ", num_kv_heads, " D ", head_dim, " ",
                  dtype_name(dtype), " T ", slots.size(), heads_first ? " heads first" : "",
                  " gap ", gap);
  }
};

TestTensor make_pages(const TestTarget& target, const Case& test) {
  const int64_t page = test.page_size * test.num_kv_heads * test.head_dim + 3;
  const int64_t row = test.num_kv_heads * test.head_dim;
  const std::vector<int64_t> strides =
      test.heads_first
          ? std::vector<int64_t>{page, test.head_dim, test.page_size * test.head_dim, 1}
          : std::vector<int64_t>{page, row, test.head_dim, 1};
  TestTensor pages(target.device, test.dtype,
                   {test.num_pages, test.page_size, test.num_kv_heads, test.head_dim}, strides,
                   Poison::kNan);
  for (int64_t p = 0; p < test.num_pages; ++p) {
    for (int64_t s = 0; s < test.page_size; ++s) {
      for (int64_t h = 0; h < test.num_kv_heads; ++h) {
        for (int64_t d = 0; d < test.head_dim; ++d) {
          pages.set({p, s, h, d}, static_cast<double>((p * 7 + s * 3 + h + d) % 50));
        }
      }
    }
  }
  return pages;
}

TestTensor make_rows(const TestTarget& target, const Case& test, Random& random) {
  const auto num_tokens = static_cast<int64_t>(test.slots.size());
  const int64_t head = test.head_dim + test.gap;
  TestTensor rows(target.device, test.dtype, {num_tokens, test.num_kv_heads, test.head_dim},
                  {test.num_kv_heads * head + test.gap, head, 1}, Poison::kNan);
  for (int64_t t = 0; t < num_tokens; ++t) {
    for (int64_t h = 0; h < test.num_kv_heads; ++h) {
      for (int64_t d = 0; d < test.head_dim; ++d) rows.set({t, h, d}, random.normal());
    }
  }
  return rows;
}

// Applies the definition to a host image.
void write_slots(TestTensor& pages, const TestTensor& rows, const Case& test) {
  for (size_t t = 0; t < test.slots.size(); ++t) {
    if (test.slots[t] < 0) continue;
    for (int64_t h = 0; h < test.num_kv_heads; ++h) {
      for (int64_t d = 0; d < test.head_dim; ++d) {
        pages.set({test.slots[t] / test.page_size, test.slots[t] % test.page_size, h, d},
                  rows.get({static_cast<int64_t>(t), h, d}));
      }
    }
  }
}

void check(const TestTarget& target, const Case& test) {
  SCOPED_TRACE(concat(target.name(), " ", test.name(), " seed ", testing::test_seed()));
  target.activate();
  Random random(testing::test_seed());
  TestTensor k_pages = make_pages(target, test);
  TestTensor v_pages = make_pages(target, test);
  TestTensor k = make_rows(target, test, random);
  TestTensor v = make_rows(target, test, random);
  TestTensor slots(target.device, DType::kInt64, {static_cast<int64_t>(test.slots.size())},
                   Poison::kNan);
  for (size_t t = 0; t < test.slots.size(); ++t) {
    slots.set({static_cast<int64_t>(t)}, static_cast<double>(test.slots[t]));
  }
  TestTensor expected_k = k_pages;
  TestTensor expected_v = v_pages;
  write_slots(expected_k, k, test);
  write_slots(expected_v, v, test);
  kv_write(k.upload(), v.upload(), k_pages.upload(), v_pages.upload(), slots.upload(), nullptr);
  k_pages.download();
  v_pages.download();
  EXPECT_TRUE(k_pages.surroundings_intact());
  EXPECT_TRUE(v_pages.surroundings_intact());
  EXPECT_EQ(k_pages.element_bytes(), expected_k.element_bytes());
  EXPECT_EQ(v_pages.element_bytes(), expected_v.element_bytes());
}

TEST(KvWrite, WritesSlotsAndSkipsMinusOne) {
  for (const TestTarget& target : testing::all_test_targets()) {
    for (DType dtype : kFloatTypes) {
      for (bool heads_first : {false, true}) {
        for (int64_t gap : {0, 5}) {
          check(target, {.dtype = dtype,
                         .slots = {5, -1, 9, 19, 0, -1, 6},
                         .heads_first = heads_first,
                         .gap = gap});
        }
      }
    }
  }
}

// A batch padded up to a fixed size: the fillers must not wrap around to the last slot.
TEST(KvWrite, FillersLeaveTheLastSlotOfThePoolAlone) {
  for (const TestTarget& target : testing::all_test_targets()) {
    check(target, {.num_pages = 8, .page_size = 16, .slots = {5, -1, 9}});
    check(target, {.num_pages = 8, .page_size = 16, .slots = {-1, -1, -1, -1}});
  }
}

TEST(KvWrite, OnePageSlotPerToken) {
  for (const TestTarget& target : testing::all_test_targets()) {
    check(target, {.num_pages = 9, .page_size = 1, .slots = {8, 0, 3}});
  }
}

TEST(KvWrite, RandomSlots) {
  Random random(testing::test_seed());
  for (const TestTarget& target : testing::all_test_targets()) {
    for (int round = 0; round < 20; ++round) {
      Case test = {.num_pages = 1 + random.below(20),
                   .page_size = 1 + random.below(17),
                   .num_kv_heads = 1 + random.below(4),
                   .head_dim = 1 + random.below(70),
                   .dtype = kFloatTypes[random.below(3)],
                   .slots = {},
                   .heads_first = random.below(2) == 1,
                   .gap = random.below(3)};
      std::set<int64_t> used;
      for (int64_t i = 0; i < 30; ++i) {
        const int64_t slot = random.below(test.num_pages * test.page_size);
        test.slots.push_back(used.insert(slot).second ? slot : -1);
      }
      check(target, test);
    }
  }
}

TEST(KvWrite, ManyTokensOverThreads) {
  Case test = {.num_pages = 40, .page_size = 16, .head_dim = 64, .dtype = DType::kBFloat16};
  for (int64_t slot = 639; slot >= 0; --slot) test.slots.push_back(slot);
  for (const TestTarget& target : testing::all_test_targets()) check(target, test);
}

// Keys and values interleaved page by page in one allocation.
TEST(KvWrite, AcceptsHalvesOfOneBuffer) {
  std::vector<float> buffer(3 * 2 * 4, 0.0f);  // [P, 2, S * D] with S 2, H 1, D 2
  TensorView k_pages = TensorView::contiguous(buffer.data(), DType::kFloat32, {3, 2, 1, 2});
  k_pages.strides[0] = 8;
  TensorView v_pages = k_pages;
  v_pages.data = buffer.data() + 4;
  std::vector<float> k = {1, 2};
  std::vector<float> v = {3, 4};
  int64_t slot = 3;
  kv_write(TensorView::contiguous(k.data(), DType::kFloat32, {1, 1, 2}),
           TensorView::contiguous(v.data(), DType::kFloat32, {1, 1, 2}), k_pages, v_pages,
           TensorView::contiguous(&slot, DType::kInt64, {1}), nullptr);
  std::vector<float> expected(24, 0.0f);
  expected[10] = 1;
  expected[11] = 2;
  expected[14] = 3;
  expected[15] = 4;
  EXPECT_EQ(buffer, expected);
}

TEST(KvWrite, NoTokensLaunchNothing) {
  std::vector<float> pages(64, 1.0f);
  counters().reset();
  kv_write(TensorView::contiguous(nullptr, DType::kFloat32, {0, 1, 4}),
           TensorView::contiguous(nullptr, DType::kFloat32, {0, 1, 4}),
           TensorView::contiguous(pages.data(), DType::kFloat32, {2, 2, 1, 4}),
           TensorView::contiguous(pages.data() + 32, DType::kFloat32, {2, 2, 1, 4}),
           TensorView::contiguous(nullptr, DType::kInt64, {0}), nullptr);
  EXPECT_EQ(counters().launches.load(), 0);
  EXPECT_EQ(pages, std::vector<float>(64, 1.0f));
}

class KvWriteErrors : public ::testing::Test {
 protected:
  void expect(const std::string& text) {
    testing::expect_error<std::invalid_argument>(
        "kv_write: " + text, [&] { kv_write(k_, v_, k_pages_, v_pages_, slots_, nullptr); });
    EXPECT_EQ(memory_, std::vector<float>(256, 1.0f));
  }

  std::vector<float> memory_ = std::vector<float>(256, 1.0f);
  std::vector<int64_t> slot_memory_ = {0, 7};
  TensorView k_pages_ = TensorView::contiguous(memory_.data(), DType::kFloat32, {2, 4, 2, 4});
  TensorView v_pages_ = TensorView::contiguous(memory_.data() + 64, DType::kFloat32, {2, 4, 2, 4});
  TensorView k_ = TensorView::contiguous(memory_.data() + 128, DType::kFloat32, {2, 2, 4});
  TensorView v_ = TensorView::contiguous(memory_.data() + 160, DType::kFloat32, {2, 2, 4});
  TensorView slots_ = TensorView::contiguous(slot_memory_.data(), DType::kInt64, {2});
};

TEST_F(KvWriteErrors, SlotsAreCheckedBeforeAnythingIsWritten) {
  slot_memory_[1] = 8;
  expect("slot_mapping[1] is 8; expected -1 (skip) or 0 to 7, the slots of k_pages");
  slot_memory_[1] = -2;
  expect("slot_mapping[1] is -2; expected -1 (skip) or 0 to 7, the slots of k_pages");
  slot_memory_[1] = int64_t{1} << 62;
  expect(
      "slot_mapping[1] is 4611686018427387904; expected -1 (skip) or 0 to 7, the slots of k_pages");
}

TEST_F(KvWriteErrors, Shapes) {
  k_ = TensorView::contiguous(memory_.data() + 128, DType::kFloat32, {2, 3, 4});
  expect("k has shape [2, 3, 4]; expected 2 in dimension 1, the heads of k_pages");
  k_ = TensorView::contiguous(memory_.data() + 128, DType::kFloat32, {3, 2, 4});
  expect("v has shape [2, 2, 4]; expected 3 in dimension 0, the tokens of k");
  k_ = TensorView::contiguous(memory_.data() + 128, DType::kFloat32, {2, 2, 5});
  expect("k has shape [2, 2, 5]; expected 4 in dimension 2, the head dim of k_pages");
  v_pages_.shape[0] = 1;
  expect("v_pages has shape [1, 4, 2, 4]; expected 2 in dimension 0, as k_pages");
  k_ = TensorView::contiguous(memory_.data() + 128, DType::kFloat32, {2, 8});
  expect("k has 2 dimensions (shape [2, 8]); expected 3");
}

TEST_F(KvWriteErrors, SlotMapping) {
  slots_.dtype = DType::kInt32;
  expect("slot_mapping has dtype int32; expected int64");
  slots_ = TensorView::contiguous(slot_memory_.data(), DType::kInt64, {1});
  expect("slot_mapping has shape [1]; expected 2 in dimension 0, the tokens of k");
}

TEST_F(KvWriteErrors, DtypesDevicesStridesAndOverlap) {
  v_.dtype = DType::kFloat16;
  expect("v has dtype float16; expected float32 as k_pages");
  v_.dtype = DType::kFloat32;
  v_pages_.device = {.type = DeviceType::kCuda, .index = 2};
  expect("v_pages is on cuda:2; expected cpu, where k is");
  v_pages_.device = {};
  v_pages_.data = memory_.data() + 32;
  expect("k_pages overlaps v_pages in memory; expected separate memory");
  v_pages_.data = memory_.data() + 64;
  k_.data = memory_.data() + 8;
  expect("k_pages overlaps k in memory; expected separate memory");
  k_pages_.strides[3] = 2;
  expect("k_pages has stride 2 in its last dimension; expected 1");
  k_pages_.strides[3] = 1;
  k_pages_.strides[0] = 0;
  expect(
      "k_pages is written but its elements overlap (a stride of 0 over 1 elements); expected "
      "strides that keep elements apart");
}

}  // namespace
}  // namespace astrai::kernels
