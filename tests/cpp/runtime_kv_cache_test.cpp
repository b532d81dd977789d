#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "runtime/kv_cache.h"
#include "runtime_test_support.h"

namespace astrai::runtime {
namespace {

constexpr int64_t kLayers = 3;
constexpr int64_t kPages = 6;
constexpr int64_t kPageSize = 4;
constexpr int64_t kHeads = 2;
constexpr int64_t kDim = 8;

using Ids = std::vector<int64_t>;

// K and V inside one allocation of float, in one of the layouts that callers use.
struct Storage {
  enum Layout { kSeparate, kInterleaved, kHeadMajor, kPaddedRows, kReversedLayers };

  explicit Storage(Layout layout) {
    // Strides of [layer, page, token, head, dim], and where V starts.
    std::array<int64_t, 5> strides{};
    int64_t v_start = 0;
    int64_t k_start = 0;
    int64_t total = 2 * kLayers * kPages * kPageSize * kHeads * kDim;
    const int64_t page = kPageSize * kHeads * kDim;
    switch (layout) {
      case kSeparate:
        strides = {kPages * page, page, kHeads * kDim, kDim, 1};
        v_start = total / 2;
        break;
      case kInterleaved:  // [layer, page, 2, token, head, dim]
        strides = {2 * kPages * page, 2 * page, kHeads * kDim, kDim, 1};
        v_start = page;
        break;
      case kHeadMajor:  // [layer, page, head, token, dim]
        strides = {kPages * page, page, kDim, kPageSize * kDim, 1};
        v_start = total / 2;
        break;
      case kPaddedRows:  // each row of dim has five unused elements behind it
        strides = {kPages * kPageSize * kHeads * (kDim + 5), kPageSize * kHeads * (kDim + 5),
                   kHeads * (kDim + 5), kDim + 5, 1};
        total = total / kDim * (kDim + 5);
        v_start = total / 2;
        break;
      case kReversedLayers:
        strides = {-kPages * page, page, kHeads * kDim, kDim, 1};
        k_start = (kLayers - 1) * kPages * page;
        v_start = total / 2 + k_start;
        break;
    }
    values.resize(static_cast<size_t>(total));
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
    k = view(k_start, strides);
    v = view(v_start, strides);
  }

  TensorView view(int64_t start, const std::array<int64_t, 5>& strides) {
    TensorView result = TensorView::contiguous(values.data() + start, DType::kFloat32,
                                               {kLayers, kPages, kPageSize, kHeads, kDim});
    for (size_t axis = 0; axis < 5; ++axis) result.strides[axis] = strides[axis];
    return result;
  }

  std::vector<float> values;
  TensorView k;
  TensorView v;
};

int64_t offset_of(const TensorView& view, std::initializer_list<int64_t> index) {
  int64_t offset = 0;
  size_t axis = 0;
  for (int64_t i : index) offset += i * view.strides[axis++];
  return offset;
}

struct Fixture {
  explicit Fixture(Storage::Layout layout)
      : storage(layout),
        test(small_shape(kPageSize)),
        pool(kPages, kPageSize),
        cache(storage.k, storage.v, pool, test.workspace) {}

  Storage storage;
  TestWorkspace test;
  PagePool pool;
  KVCache cache;
};

class KVCacheLayouts : public ::testing::TestWithParam<Storage::Layout> {};

TEST_P(KVCacheLayouts, LayersAreViewsOfTheStorage) {
  Fixture f(GetParam());
  EXPECT_EQ(f.cache.num_layers(), kLayers);
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    const LayerPages pages = f.cache.layer(layer);
    for (const auto& [part, whole] :
         {std::pair{pages.k_pages, f.storage.k}, std::pair{pages.v_pages, f.storage.v}}) {
      EXPECT_EQ(part.shape_string(), "[6, 4, 2, 8]");
      EXPECT_EQ(part.dtype, DType::kFloat32);
      EXPECT_EQ(part.ptr<float>() + offset_of(part, {5, 3, 1, 7}),
                whole.ptr<float>() + offset_of(whole, {layer, 5, 3, 1, 7}));
      EXPECT_EQ(part.ptr<float>() + offset_of(part, {0, 1, 1, 2}),
                whole.ptr<float>() + offset_of(whole, {layer, 0, 1, 1, 2}));
    }
  }
}

// Compares all of the storage with a naive copy: every layer, K and V, only the tokens that count.
TEST_P(KVCacheLayouts, PageCopiesMoveJustTheValidTokens) {
  Fixture f(GetParam());
  f.pool.add_task(1);
  ASSERT_TRUE(f.pool.try_reserve(1, 6));
  f.pool.append(1, 6);
  f.pool.fork(1, 2);
  ASSERT_TRUE(f.pool.try_reserve(2, 1));  // page 1 -> page 2, two tokens
  std::vector<float> expected = f.storage.values;
  for (const TensorView& view : {f.storage.k, f.storage.v}) {
    const int64_t start = view.ptr<float>() - f.storage.values.data();
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      for (int64_t token = 0; token < 2; ++token) {
        for (int64_t head = 0; head < kHeads; ++head) {
          for (int64_t dim = 0; dim < kDim; ++dim) {
            const int64_t from = start + offset_of(view, {layer, 1, token, head, dim});
            const int64_t to = start + offset_of(view, {layer, 2, token, head, dim});
            expected[static_cast<size_t>(to)] = f.storage.values[static_cast<size_t>(from)];
          }
        }
      }
    }
  }
  ASSERT_NE(expected, f.storage.values);
  f.cache.apply_page_copies();
  EXPECT_EQ(f.storage.values, expected);
  EXPECT_EQ(f.pool.num_pending_copies(), 0);
  f.cache.apply_page_copies();  // nothing left to do
  EXPECT_EQ(f.storage.values, expected);
}

std::string layout_name(const ::testing::TestParamInfo<Storage::Layout>& info) {
  const char* names[] = {"Separate", "Interleaved", "HeadMajor", "PaddedRows", "ReversedLayers"};
  return names[info.param];
}

INSTANTIATE_TEST_SUITE_P(Layouts, KVCacheLayouts,
                         ::testing::Values(Storage::kSeparate, Storage::kInterleaved,
                                           Storage::kHeadMajor, Storage::kPaddedRows,
                                           Storage::kReversedLayers),
                         layout_name);

TEST(KVCache, BindDoesTheCopiesAndKeepsTheStep) {
  Fixture f(Storage::kSeparate);
  f.pool.add_task(1);
  ASSERT_TRUE(f.pool.try_reserve(1, 6));
  f.pool.append(1, 6);
  f.pool.fork(1, 2);
  ASSERT_TRUE(f.pool.try_reserve(2, 1));
  ASSERT_TRUE(f.pool.try_reserve(1, 1));
  const StepMetadata& step = f.cache.bind(Ids{1, 2}, Ids{1, 1}, 3);
  EXPECT_EQ(&step, &f.cache.step());
  EXPECT_EQ(step.num_tasks, 2);
  EXPECT_EQ(step.num_rows, 3);
  EXPECT_EQ(step.max_kv_len, 7);
  EXPECT_EQ(f.pool.num_pending_copies(), 0);
  const auto* k = f.storage.k.ptr<float>();
  EXPECT_EQ(k[offset_of(f.storage.k, {2, 2, 1, 1, 7})], k[offset_of(f.storage.k, {2, 1, 1, 1, 7})]);
  const int64_t* slots = f.test.workspace.slice("slot_mapping").ptr<int64_t>();
  EXPECT_EQ(slots[0], 1 * kPageSize + 2);
  EXPECT_EQ(slots[1], 2 * kPageSize + 2);
  EXPECT_EQ(slots[2], -1);
}

TEST(KVCache, RefusedBindKeepsTheLastStep) {
  Fixture f(Storage::kSeparate);
  f.pool.add_task(1);
  ASSERT_TRUE(f.pool.try_reserve(1, 2));
  f.cache.bind(Ids{1}, Ids{2});
  EXPECT_THROW(f.cache.bind(Ids{9}, Ids{1}), std::invalid_argument);
  EXPECT_EQ(f.cache.step().num_tokens, 2);
}

// Filler rows of a padded step have no slot; a write that follows the mapping leaves every live
// slot of other tasks alone, the last one of the pool included.
TEST(KVCache, PaddedStepsNeverTouchLiveSlots) {
  Fixture f(Storage::kSeparate);
  f.pool.add_task(1);
  f.pool.add_task(2);
  ASSERT_TRUE(f.pool.try_reserve(1, 3));
  f.pool.append(1, 3);
  ASSERT_TRUE(f.pool.try_reserve(2, 20));  // pages 1 to 5: the last slot of the pool is its
  f.pool.append(2, 20);
  ASSERT_EQ(f.pool.pages(2).back(), kPages - 1);
  const StepMetadata step = [&] {
    EXPECT_TRUE(f.pool.try_reserve(1, 1));
    return f.cache.bind(Ids{1}, Ids{1}, 5);
  }();
  const int64_t* slots = f.test.workspace.slice("slot_mapping").ptr<int64_t>();
  std::vector<int64_t> written;
  for (int64_t row = 0; row < step.num_row_tokens; ++row) {
    if (slots[row] != -1) written.push_back(slots[row]);
  }
  EXPECT_EQ(written, std::vector<int64_t>{3});
}

// ---- errors
// ---------------------------------------------------------------------------------------

TEST(KVCacheErrors, RefusesStorageThatDoesNotFit) {
  Storage storage(Storage::kSeparate);
  TestWorkspace test(small_shape(kPageSize));
  PagePool pool(kPages, kPageSize);
  const auto text = [&](const TensorView& k, const TensorView& v) {
    return message_of<std::invalid_argument>([&] { KVCache(k, v, pool, test.workspace); });
  };
  const auto changed = [&](auto&& change) {
    TensorView view = storage.v;
    change(view);
    return text(storage.k, view);
  };
  expect_contains(changed([](TensorView& t) { t.ndim = 4; }),
                  "kv_cache: v has shape [3, 6, 4, 2]; expected [num_layers, num_pages, ");
  const char* shapes[] = {"[9, 6, 4, 2, 8]", "[3, 9, 4, 2, 8]", "[3, 6, 9, 2, 8]",
                          "[3, 6, 4, 9, 8]", "[3, 6, 4, 2, 9]"};
  for (size_t axis = 0; axis < 5; ++axis) {
    expect_contains(changed([&](TensorView& t) { t.shape[axis] = 9; }),
                    concat("kv_cache: v has shape ", shapes[axis], "; expected [3, 6, 4, 2, 8]"));
  }
  expect_contains(changed([](TensorView& t) { t.dtype = DType::kFloat16; }),
                  "kv_cache: v has dtype float16; expected float32");
  expect_contains(changed([](TensorView& t) { t.device.type = DeviceType::kCuda; }),
                  "kv_cache: v is on cuda:0; expected cpu");
  expect_contains(changed([](TensorView& t) { t.strides[4] = 2; }),
                  "kv_cache: v has stride 2 in head_dim; expected 1");
  expect_contains(changed([](TensorView& t) { t.strides[1] = 0; }),
                  "kv_cache: v has stride 0 in axis 1 of length 6");
  expect_contains(changed([](TensorView& t) { t.data = nullptr; }),
                  "kv_cache: v is a null pointer");
  TensorView k = storage.k;
  k.shape[1] = 7;
  expect_contains(text(k, storage.v),
                  "kv_cache: k has shape [3, 7, 4, 2, 8]; expected [3, 6, 4, 2, 8]");
  k = storage.k;
  k.shape[0] = 0;
  expect_contains(text(k, storage.v), "with at least one layer");
}

TEST(KVCacheErrors, RefusesAPoolOfAnotherPageSize) {
  Storage storage(Storage::kSeparate);
  TestWorkspace test(small_shape(kPageSize));
  PagePool pool(kPages, kPageSize + 1);
  expect_contains(message_of<std::invalid_argument>(
                      [&] { KVCache(storage.k, storage.v, pool, test.workspace); }),
                  "kv_cache: the pool has page_size 5; expected 4");
}

TEST(KVCacheErrors, RefusesALayerThatIsNotThere) {
  Fixture f(Storage::kSeparate);
  expect_contains(message_of<std::invalid_argument>([&] { (void)f.cache.layer(3); }),
                  "kv_cache: layer 3; expected 0 to 2");
  expect_contains(message_of<std::invalid_argument>([&] { (void)f.cache.layer(-1); }),
                  "kv_cache: layer -1; expected 0 to 2");
}

// No memory is touched: the label alone decides.
TEST(KVCacheErrors, CopiesOnADeviceAreRefusedBeforeAnyIsTaken) {
  const Device cuda{.type = DeviceType::kCuda, .index = 0};
  Storage storage(Storage::kSeparate);
  storage.k.device = cuda;
  storage.v.device = cuda;
  const WorkspaceShape shape = small_shape(kPageSize);
  const WorkspaceLayout plan = plan_workspace(shape);
  GuardedBuffer slab(plan.total_bytes);
  GuardedBuffer mirror(plan.host_inputs.bytes);
  InferenceWorkspace workspace(shape, slab.view(cuda), mirror.view());
  PagePool pool(kPages, kPageSize);
  KVCache cache(storage.k, storage.v, pool, workspace);
  cache.apply_page_copies();  // none queued
  pool.add_task(1);
  ASSERT_TRUE(pool.try_reserve(1, 2));
  pool.append(1, 2);
  pool.fork(1, 2);
  ASSERT_TRUE(pool.try_reserve(2, 1));
  const std::vector<float> before = storage.values;
  expect_contains(message_of<std::runtime_error>([&] { cache.apply_page_copies(); }),
                  "apply_page_copies: tensors are on a CUDA device");
  EXPECT_EQ(pool.num_pending_copies(), 1);
  EXPECT_EQ(storage.values, before);
}

}  // namespace
}  // namespace astrai::runtime
