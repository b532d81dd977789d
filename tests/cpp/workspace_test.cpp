#include "runtime/workspace.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "runtime_test_support.h"

namespace astrai::runtime {
namespace {

int64_t numel(const WorkspaceSlice& slice) {
  int64_t count = 1;
  for (int i = 0; i < slice.ndim; ++i) count *= slice.shape[static_cast<size_t>(i)];
  return count;
}

WorkspaceShape random_shape(std::mt19937& random) {
  const auto pick = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  WorkspaceShape shape;
  shape.num_kv_heads = pick(1, 4);
  shape.num_q_heads = shape.num_kv_heads * pick(1, 5);
  shape.head_dim = pick(1, 70);
  shape.hidden_size = pick(0, 90);
  shape.vocab_size = pick(0, 300);
  shape.max_batch = pick(1, 9);
  shape.max_context = pick(1, 500);
  shape.max_step_tokens = shape.max_batch + pick(0, 300);
  shape.page_size = pick(1, 40);
  shape.max_splits = pick(1, 9);
  const DType dtypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  shape.dtype = dtypes[pick(0, 2)];
  return shape;
}

std::vector<WorkspaceShape> shapes_to_try() {
  std::mt19937 random(20240607);
  std::vector<WorkspaceShape> shapes = {small_shape(1), small_shape(3), small_shape(16)};
  for (int i = 0; i < 40; ++i) shapes.push_back(random_shape(random));
  return shapes;
}

TEST(PlanWorkspace, SmallShapeHasTheSlicesWorkedOutByHand) {
  const WorkspaceLayout layout = plan_workspace(small_shape(16));
  const struct {
    const char* name;
    DType dtype;
    std::vector<int64_t> shape;
    int64_t offset;
    int64_t bytes;
  } expected[] = {
      {"input_ids", DType::kInt64, {64}, 0, 512},
      {"qo_indptr", DType::kInt32, {6}, 512, 24},
      {"kv_indptr", DType::kInt32, {6}, 768, 24},
      {"kv_lens", DType::kInt32, {5}, 1024, 20},
      {"last_rows", DType::kInt64, {5}, 1280, 40},
      {"positions", DType::kInt64, {64}, 1536, 512},
      {"slot_mapping", DType::kInt64, {64}, 2048, 512},
      {"kv_indices", DType::kInt32, {35}, 2560, 140},  // 5 tasks of 7 pages
      {"temperature", DType::kFloat32, {5}, 2816, 20},
      {"top_p", DType::kFloat32, {5}, 3072, 20},
      {"min_p", DType::kFloat32, {5}, 3328, 20},
      {"repetition_penalty", DType::kFloat32, {5}, 3584, 20},
      {"frequency_penalty", DType::kFloat32, {5}, 3840, 20},
      {"presence_penalty", DType::kFloat32, {5}, 4096, 20},
      {"top_k", DType::kInt32, {5}, 4352, 20},
      {"seeds", DType::kInt64, {5}, 4608, 40},
      {"next_ids", DType::kInt64, {5}, 4864, 40},
      {"hidden", DType::kFloat32, {5, 32}, 5120, 640},
      {"logits", DType::kFloat32, {5, 50}, 5888, 1000},
      {"o_part", DType::kFloat32, {5, 4, 3, 8}, 6912, 1920},
      {"ml_part", DType::kFloat32, {5, 4, 3, 2}, 8960, 480},
  };
  ASSERT_EQ(layout.slices.size(), std::size(expected));
  for (size_t i = 0; i < layout.slices.size(); ++i) {
    const WorkspaceSlice& slice = layout.slices[i];
    EXPECT_EQ(slice.name, expected[i].name);
    EXPECT_EQ(slice.dtype, expected[i].dtype) << slice.name;
    EXPECT_EQ(std::vector<int64_t>(slice.shape.begin(), slice.shape.begin() + slice.ndim),
              expected[i].shape)
        << slice.name;
    EXPECT_EQ(slice.offset, expected[i].offset) << slice.name;
    EXPECT_EQ(slice.bytes, expected[i].bytes) << slice.name;
  }
  EXPECT_EQ(layout.total_bytes, 9440);
  EXPECT_EQ(layout.step_metadata.offset, 512);
  EXPECT_EQ(layout.step_metadata.bytes, 2700 - 512);
  EXPECT_EQ(layout.sampling_inputs.offset, 2816);
  EXPECT_EQ(layout.sampling_inputs.bytes, 4648 - 2816);
  EXPECT_EQ(layout.host_inputs.offset, 0);
  EXPECT_EQ(layout.host_inputs.bytes, 4648);
}

TEST(PlanWorkspace, SlicesAreAlignedTightAndUniquelyNamed) {
  for (const WorkspaceShape& shape : shapes_to_try()) {
    const WorkspaceLayout layout = plan_workspace(shape);
    std::set<std::string> names;
    int64_t end = 0;
    for (const WorkspaceSlice& slice : layout.slices) {
      EXPECT_TRUE(names.insert(slice.name).second) << slice.name;
      EXPECT_EQ(slice.offset % kWorkspaceAlignment, 0) << slice.name;
      EXPECT_GE(slice.offset, end) << slice.name;
      EXPECT_LT(slice.offset - end, kWorkspaceAlignment) << slice.name;
      EXPECT_EQ(slice.bytes, numel(slice) * dtype_bytes(slice.dtype)) << slice.name;
      EXPECT_GT(slice.bytes, 0) << slice.name;
      end = slice.offset + slice.bytes;
    }
    EXPECT_EQ(layout.total_bytes, end);
    EXPECT_TRUE(layout.shape == shape);
  }
}

TEST(PlanWorkspace, ZeroWidthOutputsAreLeftOut) {
  WorkspaceShape shape = small_shape();
  shape.hidden_size = 0;
  shape.vocab_size = 0;
  const WorkspaceLayout layout = plan_workspace(shape);
  EXPECT_THROW(layout.find("hidden"), std::invalid_argument);
  EXPECT_THROW(layout.find("logits"), std::invalid_argument);
  EXPECT_EQ(layout.slices.size(), plan_workspace(small_shape()).slices.size() - 2);
}

TEST(PlanWorkspace, HiddenHasTheActivationDtype) {
  WorkspaceShape shape = small_shape();
  shape.dtype = DType::kBFloat16;
  EXPECT_EQ(plan_workspace(shape).find("hidden").dtype, DType::kBFloat16);
  EXPECT_EQ(plan_workspace(shape).find("hidden").bytes, 5 * 32 * 2);
  EXPECT_EQ(plan_workspace(shape).find("o_part").dtype, DType::kFloat32);
}

TEST(PlanWorkspace, RefusesNonsenseNamingFieldAndValue) {
  const struct {
    const char* field;
    int64_t WorkspaceShape::*member;
    std::vector<int64_t> bad;
  } fields[] = {
      {"num_q_heads", &WorkspaceShape::num_q_heads, {0, -4}},
      {"num_kv_heads", &WorkspaceShape::num_kv_heads, {0, -2}},
      {"head_dim", &WorkspaceShape::head_dim, {0, -64}},
      {"hidden_size", &WorkspaceShape::hidden_size, {-1}},
      {"vocab_size", &WorkspaceShape::vocab_size, {-1}},
      {"max_batch", &WorkspaceShape::max_batch, {0, -1}},
      {"max_context", &WorkspaceShape::max_context, {0, -1, int64_t{1} << 31}},
      {"max_step_tokens", &WorkspaceShape::max_step_tokens, {0, -1, int64_t{1} << 31}},
      {"page_size", &WorkspaceShape::page_size, {0, -16}},
      {"max_splits", &WorkspaceShape::max_splits, {0, -1}},
  };
  for (const auto& field : fields) {
    for (int64_t value : field.bad) {
      WorkspaceShape shape = small_shape();
      shape.*field.member = value;
      const std::string text = message_of<std::invalid_argument>([&] { plan_workspace(shape); });
      expect_contains(text, concat("workspace: ", field.field, " is ", value, "; expected "));
    }
  }
}

TEST(PlanWorkspace, RefusesHeadsThatDoNotDivide) {
  WorkspaceShape shape = small_shape();
  shape.num_q_heads = 9;
  shape.num_kv_heads = 2;
  const std::string text = message_of<std::invalid_argument>([&] { plan_workspace(shape); });
  expect_contains(text, "num_q_heads is 9 with num_kv_heads 2");
}

TEST(PlanWorkspace, RefusesFewerTokensThanTasks) {
  WorkspaceShape shape = small_shape();
  shape.max_step_tokens = 4;
  const std::string text = message_of<std::invalid_argument>([&] { plan_workspace(shape); });
  expect_contains(text, "max_step_tokens is 4 with max_batch 5");
}

TEST(PlanWorkspace, RefusesADtypeThatIsNoFloat) {
  WorkspaceShape shape = small_shape();
  shape.dtype = DType::kInt32;
  const std::string text = message_of<std::invalid_argument>([&] { plan_workspace(shape); });
  expect_contains(text, "dtype is int32; expected float32, float16 or bfloat16");
}

TEST(PlanWorkspace, RefusesAPageTableBeyondInt32) {
  WorkspaceShape shape = small_shape(1);
  shape.max_batch = 1 << 16;
  shape.max_step_tokens = 1 << 16;
  shape.max_context = 1 << 15;
  const std::string text = message_of<std::invalid_argument>([&] { plan_workspace(shape); });
  expect_contains(text, "2147483648 page table entries; expected at most 2147483647");
  shape.max_context -= 1;
  EXPECT_GT(plan_workspace(shape).total_bytes, 0);
}

TEST(PlanWorkspace, RefusesBytesBeyond63Bits) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  WorkspaceShape product = small_shape();
  product.num_q_heads = kMax;
  product.num_kv_heads = 1;
  product.max_splits = kMax;
  product.head_dim = 1;
  std::string text = message_of<std::invalid_argument>([&] { plan_workspace(product); });
  expect_contains(text, "slice \"o_part\" needs more than 2^63 - 1 bytes");

  // Each slice fits, their sum does not: o_part has 2^62 bytes and a little less, twice that is
  // too much for ml_part, of the same size when head_dim is 2.
  WorkspaceShape sum = small_shape();
  sum.max_batch = 1;
  sum.num_q_heads = kMax;
  sum.num_kv_heads = 1;
  sum.head_dim = 2;
  sum.max_splits = int64_t{1} << 28;
  EXPECT_GT(plan_workspace(sum).total_bytes, int64_t{1} << 62);
  sum.max_splits = (int64_t{1} << 29) - 1;
  text = message_of<std::invalid_argument>([&] { plan_workspace(sum); });
  expect_contains(text, "the slab up to slice \"ml_part\" needs more than 2^63 - 1 bytes");
}

// Writes every slice full of a byte of its own and reads all of them back: slices cover no byte
// twice, and nothing outside the slab.
TEST(InferenceWorkspace, SlicesDoNotOverlapAndStayInsideTheSlab) {
  for (const WorkspaceShape& shape : shapes_to_try()) {
    TestWorkspace test(shape);
    test.buffer.fill(0);
    const std::vector<WorkspaceSlice>& slices = test.workspace.layout().slices;
    const auto pattern = [](size_t i) { return static_cast<uint8_t>(i + 1); };
    for (size_t i = 0; i < slices.size(); ++i) {
      const TensorView view = test.workspace.slice(slices[i].name);
      std::memset(view.data, pattern(i),
                  static_cast<size_t>(view.numel() * dtype_bytes(view.dtype)));
    }
    std::vector<int64_t> counts(slices.size() + 1, 0);
    for (uint8_t byte : test.buffer.contents()) ++counts[byte];
    int64_t padding = test.buffer.bytes();
    for (size_t i = 0; i < slices.size(); ++i) {
      EXPECT_EQ(counts[pattern(i)], slices[i].bytes) << slices[i].name;
      padding -= slices[i].bytes;
      const auto* bytes = test.workspace.slice(slices[i].name).ptr<uint8_t>();
      for (int64_t at = 0; at < slices[i].bytes; ++at) ASSERT_EQ(bytes[at], pattern(i));
    }
    EXPECT_EQ(counts[0], padding);
    EXPECT_TRUE(test.buffer.guards_intact());
  }
}

TEST(InferenceWorkspace, CarvesWhereThePlanMeasured) {
  for (const WorkspaceShape& shape : shapes_to_try()) {
    const WorkspaceLayout plan = plan_workspace(shape);
    GuardedBuffer buffer(plan.total_bytes);
    const InferenceWorkspace workspace(shape, buffer.view());
    for (const WorkspaceSlice& slice : plan.slices) {
      for (int repeat = 0; repeat < 2; ++repeat) {  // addresses never change
        const TensorView view = workspace.slice(slice.name);
        EXPECT_EQ(view.ptr<uint8_t>() - buffer.data(), slice.offset);
        EXPECT_EQ(view.dtype, slice.dtype);
        EXPECT_EQ(view.ndim, slice.ndim);
        EXPECT_EQ(view.shape, slice.shape);
        EXPECT_TRUE(view.is_contiguous());
        EXPECT_EQ(reinterpret_cast<uintptr_t>(view.data) % kWorkspaceAlignment, 0u);
      }
    }
    EXPECT_FALSE(workspace.has_host_mirror());
    EXPECT_EQ(workspace.host_slice("positions").data, workspace.slice("positions").data);
  }
}

TEST(InferenceWorkspace, BindTasksArraysAreOneRunOfTheSlab) {
  TestWorkspace test(small_shape());
  const WorkspaceLayout& layout = test.workspace.layout();
  for (const char* name : {"qo_indptr", "kv_indptr", "kv_lens", "last_rows", "positions",
                           "slot_mapping", "kv_indices"}) {
    const WorkspaceSlice& slice = layout.find(name);
    EXPECT_GE(slice.offset, layout.step_metadata.offset) << name;
    EXPECT_LE(slice.offset + slice.bytes, layout.step_metadata.offset + layout.step_metadata.bytes)
        << name;
  }
  const InferenceWorkspace::StepArrays& arrays = test.workspace.step_arrays();
  EXPECT_EQ(arrays.kv_indices_capacity, 35);
  EXPECT_EQ(arrays.kv_indices_offset, 2560 - 512);
  EXPECT_EQ(arrays.kv_indices, test.workspace.slice("kv_indices").ptr<int32_t>());
  EXPECT_EQ(arrays.slot_mapping, test.workspace.slice("slot_mapping").ptr<int64_t>());
}

TEST(InferenceWorkspace, UnknownSliceListsTheKnownOnes) {
  TestWorkspace test(small_shape());
  const std::string text =
      message_of<std::invalid_argument>([&] { (void)test.workspace.slice("partial_o"); });
  expect_contains(text, "no slice is named \"partial_o\"; expected one of input_ids, qo_indptr");
  expect_contains(text, "ml_part");
}

TEST(InferenceWorkspace, RefusesASlabOfAnyOtherSize) {
  const WorkspaceShape shape = small_shape();
  const int64_t bytes = plan_workspace(shape).total_bytes;
  for (int64_t wrong : {bytes - 1, bytes + 1, bytes + 256, int64_t{0}}) {
    GuardedBuffer buffer(wrong);
    const std::string text =
        message_of<std::invalid_argument>([&] { InferenceWorkspace(shape, buffer.view()); });
    EXPECT_EQ(text, concat("workspace: slab has ", wrong, " bytes; expected ", bytes));
  }
}

TEST(InferenceWorkspace, RefusesASlabItCannotCarve) {
  const WorkspaceShape shape = small_shape();
  const int64_t bytes = plan_workspace(shape).total_bytes;
  GuardedBuffer buffer(bytes + 256);
  const struct {
    const char* found;
    TensorView slab;
  } cases[] = {
      {"slab starts 64 bytes past a multiple of 256",
       TensorView::contiguous(buffer.data() + 64, DType::kUInt8, {bytes})},
      {"slab has dtype float32", TensorView::contiguous(buffer.data(), DType::kFloat32, {bytes})},
      {"slab has shape [1, 9440]",
       TensorView::contiguous(buffer.data(), DType::kUInt8, {1, bytes})},
      {"slab is a null pointer", TensorView::contiguous(nullptr, DType::kUInt8, {bytes})},
  };
  for (const auto& c : cases) {
    const std::string text =
        message_of<std::invalid_argument>([&] { InferenceWorkspace(shape, c.slab); });
    expect_contains(text, c.found);
    expect_contains(text, "; expected ");
  }
  TensorView strided = buffer.view();
  strided.shape[0] = bytes;
  strided.strides[0] = 2;
  expect_contains(message_of<std::invalid_argument>([&] { InferenceWorkspace(shape, strided); }),
                  "is not contiguous");
}

// Carving only computes addresses, so memory that is labelled as a device's stands in for it.
TEST(InferenceWorkspace, DeviceSlabIsFilledThroughAHostMirror) {
  const WorkspaceShape shape = small_shape();
  const WorkspaceLayout plan = plan_workspace(shape);
  const Device cuda{.type = DeviceType::kCuda, .index = 1};
  GuardedBuffer slab(plan.total_bytes);
  GuardedBuffer mirror(plan.host_inputs.bytes);
  const InferenceWorkspace workspace(shape, slab.view(cuda), mirror.view());
  EXPECT_TRUE(workspace.has_host_mirror());
  EXPECT_EQ(workspace.device(), cuda);
  for (const WorkspaceSlice& slice : plan.slices) {
    EXPECT_EQ(workspace.slice(slice.name).device, cuda);
    EXPECT_EQ(workspace.slice(slice.name).ptr<uint8_t>() - slab.data(), slice.offset);
    if (slice.offset >= plan.host_inputs.bytes) {
      expect_contains(
          message_of<std::invalid_argument>([&] { (void)workspace.host_slice(slice.name); }),
          "has no host side");
      continue;
    }
    EXPECT_EQ(workspace.host_slice(slice.name).device, Device{});
    EXPECT_EQ(workspace.host_slice(slice.name).ptr<uint8_t>() - mirror.data(), slice.offset);
  }
  EXPECT_EQ(workspace.step_arrays().kv_lens, workspace.host_slice("kv_lens").ptr<int32_t>());
}

TEST(InferenceWorkspace, MirrorIsRequiredOnADeviceAndRefusedOnACpu) {
  const WorkspaceShape shape = small_shape();
  const WorkspaceLayout plan = plan_workspace(shape);
  const Device cuda{.type = DeviceType::kCuda, .index = 0};
  GuardedBuffer slab(plan.total_bytes);
  GuardedBuffer mirror(plan.host_inputs.bytes);
  GuardedBuffer short_mirror(plan.host_inputs.bytes - 1);
  expect_contains(
      message_of<std::invalid_argument>([&] { InferenceWorkspace(shape, slab.view(cuda)); }),
      "host_mirror is missing with a slab on cuda:0; expected one");
  expect_contains(message_of<std::invalid_argument>(
                      [&] { InferenceWorkspace(shape, slab.view(), mirror.view()); }),
                  "host_mirror is given with a slab on cpu; expected none");
  expect_contains(message_of<std::invalid_argument>(
                      [&] { InferenceWorkspace(shape, slab.view(cuda), mirror.view(cuda)); }),
                  "host_mirror is on cuda:0; expected cpu memory");
  expect_contains(message_of<std::invalid_argument>(
                      [&] { InferenceWorkspace(shape, slab.view(cuda), short_mirror.view()); }),
                  "workspace: host_mirror has 4647 bytes; expected 4648");
}

}  // namespace
}  // namespace astrai::runtime
