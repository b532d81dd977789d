#include "runtime/workspace.h"

#include <initializer_list>
#include <limits>
#include <utility>

#include "common/check.h"

namespace astrai::runtime {
namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

// a * b and a + b for non-negative numbers; a shape whose slab nobody could address is an error.
int64_t checked_product(int64_t a, int64_t b, std::string_view name) {
  int64_t product = 0;
  ASTRAI_CHECK_ARG(!__builtin_mul_overflow(a, b, &product), "workspace: slice \"", name,
                   "\" needs more than 2^63 - 1 bytes; expected a smaller shape");
  return product;
}

int64_t checked_sum(int64_t a, int64_t b, std::string_view name) {
  int64_t sum = 0;
  ASTRAI_CHECK_ARG(!__builtin_add_overflow(a, b, &sum), "workspace: the slab up to slice \"", name,
                   "\" needs more than 2^63 - 1 bytes; expected a smaller shape");
  return sum;
}

// Lays slices one after the other, each at the next multiple of kWorkspaceAlignment.
class LayoutBuilder {
 public:
  explicit LayoutBuilder(WorkspaceLayout& layout) : layout_(layout) {}

  void add(std::string_view name, DType dtype, std::initializer_list<int64_t> shape) {
    WorkspaceSlice slice;
    slice.name = name;
    slice.dtype = dtype;
    slice.bytes = dtype_bytes(dtype);
    for (int64_t extent : shape) {
      slice.shape[slice.ndim++] = extent;
      slice.bytes = checked_product(slice.bytes, extent, name);
    }
    slice.offset = next_offset();
    layout_.total_bytes = checked_sum(slice.offset, slice.bytes, name);
    // The next slice's offset must fit as well.
    checked_sum(layout_.total_bytes, kWorkspaceAlignment, name);
    layout_.slices.push_back(std::move(slice));
  }

  int64_t next_offset() const {
    return (layout_.total_bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment *
           kWorkspaceAlignment;
  }

  ByteRange range_since(int64_t offset) const {
    return {.offset = offset, .bytes = layout_.total_bytes - offset};
  }

 private:
  WorkspaceLayout& layout_;
};

void check_shape(const WorkspaceShape& shape) {
  const struct {
    const char* name;
    int64_t value;
    int64_t min;
  } sizes[] = {
      {"num_q_heads", shape.num_q_heads, 1}, {"num_kv_heads", shape.num_kv_heads, 1},
      {"head_dim", shape.head_dim, 1},       {"hidden_size", shape.hidden_size, 0},
      {"vocab_size", shape.vocab_size, 0},   {"max_batch", shape.max_batch, 1},
      {"max_context", shape.max_context, 1}, {"max_step_tokens", shape.max_step_tokens, 1},
      {"page_size", shape.page_size, 1},     {"max_splits", shape.max_splits, 1},
  };
  for (const auto& size : sizes) {
    ASTRAI_CHECK_ARG(size.value >= size.min && size.value <= kMaxInt32, "workspace: ", size.name,
                     " is ", size.value, "; expected ", size.min, " to ", kMaxInt32);
  }
  ASTRAI_CHECK_ARG(shape.num_q_heads % shape.num_kv_heads == 0, "workspace: num_q_heads is ",
                   shape.num_q_heads, " with num_kv_heads ", shape.num_kv_heads,
                   "; expected a multiple of num_kv_heads");
  ASTRAI_CHECK_ARG(shape.max_step_tokens >= shape.max_batch, "workspace: max_step_tokens is ",
                   shape.max_step_tokens, " with max_batch ", shape.max_batch,
                   "; expected at least max_batch, one token for each task");
  ASTRAI_CHECK_ARG(is_floating(shape.dtype), "workspace: dtype is ", dtype_name(shape.dtype),
                   "; expected float32, float16 or bfloat16");
}

int64_t kv_indices_capacity(const WorkspaceShape& shape) {
  const int64_t pages_per_task = (shape.max_context + shape.page_size - 1) / shape.page_size;
  // Both factors fit in 31 bits. kv_indptr holds int32, so the product has to as well.
  const int64_t capacity = shape.max_batch * pages_per_task;
  ASTRAI_CHECK_ARG(capacity <= kMaxInt32, "workspace: max_batch ", shape.max_batch, " times ",
                   pages_per_task, " pages a task is ", capacity, " page table entries; expected ",
                   "at most ", kMaxInt32);
  return capacity;
}

void check_buffer(const char* what, const TensorView& view, int64_t bytes) {
  ASTRAI_CHECK_ARG(view.dtype == DType::kUInt8, "workspace: ", what, " has dtype ",
                   dtype_name(view.dtype), "; expected uint8");
  ASTRAI_CHECK_ARG(view.ndim == 1 && view.is_contiguous(), "workspace: ", what, " has shape ",
                   view.shape_string(), " and is ", view.is_contiguous() ? "" : "not ",
                   "contiguous; expected one contiguous dimension");
  ASTRAI_CHECK_ARG(view.numel() == bytes, "workspace: ", what, " has ", view.numel(),
                   " bytes; expected ", bytes);
  const auto address = reinterpret_cast<uintptr_t>(view.data);
  ASTRAI_CHECK_ARG(view.data != nullptr, "workspace: ", what, " is a null pointer; expected ",
                   bytes, " bytes");
  ASTRAI_CHECK_ARG(address % kWorkspaceAlignment == 0, "workspace: ", what, " starts ",
                   address % kWorkspaceAlignment, " bytes past a multiple of ", kWorkspaceAlignment,
                   "; expected an address that is a multiple of ", kWorkspaceAlignment);
}

}  // namespace

const WorkspaceSlice& WorkspaceLayout::find(std::string_view name) const {
  for (const WorkspaceSlice& slice : slices) {
    if (slice.name == name) return slice;
  }
  std::string known;
  for (const WorkspaceSlice& slice : slices) known += (known.empty() ? "" : ", ") + slice.name;
  throw std::invalid_argument(
      concat("workspace: no slice is named \"", name, "\"; expected one of ", known));
}

WorkspaceLayout plan_workspace(const WorkspaceShape& shape) {
  check_shape(shape);
  const int64_t batch = shape.max_batch;
  const int64_t tokens = shape.max_step_tokens;
  WorkspaceLayout layout;
  layout.shape = shape;
  LayoutBuilder builder(layout);

  builder.add("input_ids", DType::kInt64, {tokens});

  const int64_t step_start = builder.next_offset();
  builder.add("qo_indptr", DType::kInt32, {batch + 1});
  builder.add("kv_indptr", DType::kInt32, {batch + 1});
  builder.add("kv_lens", DType::kInt32, {batch});
  builder.add("last_rows", DType::kInt64, {batch});
  builder.add("positions", DType::kInt64, {tokens});
  builder.add("slot_mapping", DType::kInt64, {tokens});
  // Last, because it is the longest and mostly unused: a copy of the step stops within it.
  builder.add("kv_indices", DType::kInt32, {kv_indices_capacity(shape)});
  layout.step_metadata = builder.range_since(step_start);

  const int64_t sampling_start = builder.next_offset();
  for (const char* name : {"temperature", "top_p", "min_p", "repetition_penalty",
                           "frequency_penalty", "presence_penalty"}) {
    builder.add(name, DType::kFloat32, {batch});
  }
  builder.add("top_k", DType::kInt32, {batch});
  builder.add("seeds", DType::kInt64, {batch});
  layout.sampling_inputs = builder.range_since(sampling_start);
  layout.host_inputs = builder.range_since(0);

  builder.add("next_ids", DType::kInt64, {batch});
  if (shape.hidden_size > 0) builder.add("hidden", shape.dtype, {batch, shape.hidden_size});
  if (shape.vocab_size > 0) builder.add("logits", DType::kFloat32, {batch, shape.vocab_size});

  builder.add("o_part", DType::kFloat32,
              {batch, shape.num_q_heads, shape.max_splits, shape.head_dim});
  builder.add("ml_part", DType::kFloat32, {batch, shape.num_q_heads, shape.max_splits, 2});
  return layout;
}

InferenceWorkspace::InferenceWorkspace(const WorkspaceShape& shape, const TensorView& slab,
                                       const std::optional<TensorView>& host_mirror)
    : layout_(plan_workspace(shape)), slab_(slab), host_(slab) {
  check_buffer("slab", slab, layout_.total_bytes);
  const bool on_cpu = slab.device.type == DeviceType::kCpu;
  ASTRAI_CHECK_ARG(host_mirror.has_value() != on_cpu, "workspace: host_mirror is ",
                   host_mirror ? "given" : "missing", " with a slab on ", device_name(slab.device),
                   "; expected ", on_cpu ? "none, the host writes the slab itself" : "one");
  if (host_mirror) {
    ASTRAI_CHECK_ARG(host_mirror->device.type == DeviceType::kCpu, "workspace: host_mirror is on ",
                     device_name(host_mirror->device), "; expected cpu memory");
    check_buffer("host_mirror", *host_mirror, layout_.host_inputs.bytes);
    host_ = *host_mirror;
    has_mirror_ = true;
  }
  step_arrays_ = {
      .qo_indptr = host_slice("qo_indptr").ptr<int32_t>(),
      .kv_indptr = host_slice("kv_indptr").ptr<int32_t>(),
      .kv_lens = host_slice("kv_lens").ptr<int32_t>(),
      .last_rows = host_slice("last_rows").ptr<int64_t>(),
      .positions = host_slice("positions").ptr<int64_t>(),
      .slot_mapping = host_slice("slot_mapping").ptr<int64_t>(),
      .kv_indices = host_slice("kv_indices").ptr<int32_t>(),
      .kv_indices_capacity = layout_.find("kv_indices").shape[0],
      .kv_indices_offset = layout_.find("kv_indices").offset - layout_.step_metadata.offset,
  };
}

TensorView InferenceWorkspace::view_of(const WorkspaceSlice& slice, const TensorView& base) {
  TensorView view;
  view.data = base.ptr<uint8_t>() + slice.offset;
  view.dtype = slice.dtype;
  view.device = base.device;
  view.ndim = slice.ndim;
  view.shape = slice.shape;
  int64_t stride = 1;
  for (int axis = slice.ndim - 1; axis >= 0; --axis) {
    view.strides[axis] = stride;
    stride *= slice.shape[axis];
  }
  return view;
}

TensorView InferenceWorkspace::slice(std::string_view name) const {
  return view_of(layout_.find(name), slab_);
}

TensorView InferenceWorkspace::host_slice(std::string_view name) const {
  const WorkspaceSlice& slice = layout_.find(name);
  const ByteRange& inputs = layout_.host_inputs;
  ASTRAI_CHECK_ARG(slice.offset + slice.bytes <= inputs.offset + inputs.bytes,
                   "workspace: slice \"", name,
                   "\" has no host side; expected one of the inputs that the host writes");
  return view_of(slice, host_);
}

}  // namespace astrai::runtime
