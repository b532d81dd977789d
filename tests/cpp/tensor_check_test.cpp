#include "kernels/common/tensor_check.h"

#include <gtest/gtest.h>

#include <set>
#include <stdexcept>
#include <vector>

#include "support/expect_error.h"
#include "support/test_random.h"

namespace astrai::kernels {
namespace {

using testing::Random;

// Byte offsets of the elements of a view from `base`.
std::vector<int64_t> offsets(const TensorView& view, const char* base) {
  std::vector<int64_t> found;
  for (int64_t flat = 0; flat < view.numel(); ++flat) {
    int64_t at = static_cast<const char*>(view.data) - base;
    int64_t rest = flat;
    for (int i = view.ndim - 1; i >= 0; --i) {
      at += rest % view.shape[i] * view.strides[i] * dtype_bytes(view.dtype);
      rest /= view.shape[i];
    }
    found.push_back(at);
  }
  return found;
}

bool share_an_address(const TensorView& a, const TensorView& b, const char* base) {
  std::set<int64_t> bytes;
  for (int64_t at : offsets(a, base)) {
    for (int64_t i = 0; i < dtype_bytes(a.dtype); ++i) bytes.insert(at + i);
  }
  for (int64_t at : offsets(b, base)) {
    for (int64_t i = 0; i < dtype_bytes(b.dtype); ++i) {
      if (bytes.count(at + i) != 0) return true;
    }
  }
  return false;
}

bool repeats_an_address(const TensorView& view, const char* base) {
  const std::vector<int64_t> all = offsets(view, base);
  return std::set<int64_t>(all.begin(), all.end()).size() != all.size();
}

template <class Fn>
bool throws(Fn&& fn) {
  try {
    fn();
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

// Big enough for every view below; never dereferenced.
constexpr int64_t kArena = 4096;
char arena[2 * kArena];

TensorView random_view(Random& random, int64_t max_stride) {
  TensorView view;
  view.dtype = random.below(2) == 1 ? DType::kFloat32 : DType::kBFloat16;
  view.ndim = static_cast<int>(1 + random.below(3));
  for (int i = 0; i < view.ndim; ++i) {
    view.shape[i] = random.below(5);
    view.strides[i] = random.below(2 * max_stride + 1) - max_stride;
  }
  view.data = arena + kArena + 2 * random.below(60);
  return view;
}

TEST(TensorCheck, WritableMeansThatNoAddressRepeats) {
  Random random(testing::test_seed());
  int accepted = 0;
  for (int round = 0; round < 20000; ++round) {
    const TensorView view = random_view(random, 12);
    if (throws([&] { check_writable("op", {"out", view}); })) continue;
    ++accepted;
    ASSERT_FALSE(repeats_an_address(view, arena)) << "seed " << testing::test_seed();
  }
  EXPECT_GT(accepted, 2000);
}

TEST(TensorCheck, AcceptsEveryOrderOfContiguousDimensions) {
  TensorView view = TensorView::contiguous(arena, DType::kFloat16, {3, 1, 4, 5});
  check_writable("op", {"out", view});
  view.strides = {4, 999, 12, 1};  // [4, 3, 5 of which 4] in memory
  view.shape = {3, 1, 4, 4};
  check_writable("op", {"out", view});
  view.strides = {-4, 0, -12, -1};
  check_writable("op", {"out", view});
}

TEST(TensorCheck, DisjointMeansThatNoAddressIsShared) {
  Random random(testing::test_seed());
  int accepted = 0;
  int overlapping = 0;
  for (int round = 0; round < 20000; ++round) {
    const TensorView a = random_view(random, 12);
    const TensorView b = random_view(random, 12);
    if (share_an_address(a, b, arena)) {
      ++overlapping;
      ASSERT_TRUE(throws([&] { check_disjoint("op", {"a", a}, {"b", b}); }))
          << "seed " << testing::test_seed() << " round " << round;
    } else if (!throws([&] { check_disjoint("op", {"a", a}, {"b", b}); })) {
      ++accepted;
    }
  }
  EXPECT_GT(accepted, 1000);
  EXPECT_GT(overlapping, 1000);
}

// Slices of one buffer have the strides of the buffer: for them the answer is exact.
TEST(TensorCheck, SlicesOfOneBufferAreToldApartExactly) {
  Random random(testing::test_seed());
  int overlapping = 0;
  for (int round = 0; round < 20000; ++round) {
    const std::array<int64_t, 6> strides = {24, 8, 1};  // of a buffer [T, 3, 8]
    const auto slice = [&] {
      TensorView view;
      view.dtype = DType::kFloat32;
      view.ndim = 3;
      view.strides = strides;
      const std::array<int64_t, 3> extents = {5, 3, 8};
      int64_t offset = 0;
      for (int i = 0; i < 3; ++i) {
        const int64_t first = random.below(extents[i]);
        view.shape[i] = 1 + random.below(extents[i] - first);
        offset += first * strides[i];
      }
      view.data = arena + 4 * offset;
      return view;
    };
    const TensorView a = slice();
    const TensorView b = slice();
    const bool overlap = share_an_address(a, b, arena);
    overlapping += overlap;
    // Slices that keep one element of a dimension lose its stride; those may be refused too
    // readily.
    bool whole = true;
    for (int i = 0; i < 3; ++i) whole &= (a.shape[i] > 1) == (b.shape[i] > 1);
    const bool refused = throws([&] { check_disjoint("op", {"a", a}, {"b", b}); });
    if (overlap || whole) {
      ASSERT_EQ(refused, overlap) << "seed " << testing::test_seed() << " round " << round;
    }
  }
  EXPECT_GT(overlapping, 1000);
}

TEST(TensorCheck, EmptyTensorsOverlapNothing) {
  const TensorView full = TensorView::contiguous(arena, DType::kFloat32, {4, 4});
  const TensorView empty = TensorView::contiguous(arena, DType::kFloat32, {0, 4});
  check_disjoint("op", {"a", full}, {"b", empty});
  check_disjoint("op", {"a", empty}, {"b", full});
}

TEST(TensorCheck, TheVerySameTensorIsAllowedWhereAskedFor) {
  const TensorView a = TensorView::contiguous(arena, DType::kFloat32, {4, 4});
  check_disjoint_or_same("op", {"a", a}, {"b", a});
  TensorView other_dtype = a;
  other_dtype.dtype = DType::kInt32;
  testing::expect_error<std::invalid_argument>(
      "op: a overlaps b in memory; expected separate memory, or the very same tensor",
      [&] { check_disjoint_or_same("op", {"a", a}, {"b", other_dtype}); });
}

}  // namespace
}  // namespace astrai::kernels
