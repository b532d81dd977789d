#include "kernels/common/tensor_check.h"

#include <array>
#include <cstdlib>

#include "common/check.h"

namespace astrai::kernels {
namespace {

struct Dim {
  int64_t extent;
  int64_t stride;  // in bytes, made positive
};

// A view with its dimensions of extent > 1 sorted by falling stride. `begin` is its lowest address.
struct Layout {
  uintptr_t begin = 0;
  int64_t item_bytes = 0;
  int num_dims = 0;
  std::array<Dim, TensorView::kMaxDims> dims{};

  // Bytes from the lowest address to past the highest one, counting dimensions from `first` on.
  int64_t span(int first) const {
    int64_t bytes = item_bytes;
    for (int i = first; i < num_dims; ++i) bytes += (dims[i].extent - 1) * dims[i].stride;
    return bytes;
  }
};

Layout layout_of(const TensorView& view) {
  Layout layout;
  layout.item_bytes = dtype_bytes(view.dtype);
  layout.begin = reinterpret_cast<uintptr_t>(view.data);
  for (int i = 0; i < view.ndim; ++i) {
    if (view.shape[i] <= 1) continue;
    const int64_t stride = view.strides[i] * layout.item_bytes;
    if (stride < 0) layout.begin -= static_cast<uintptr_t>(-stride * (view.shape[i] - 1));
    int place = layout.num_dims++;  // insertion sort: at most kMaxDims of them
    for (; place > 0 && layout.dims[place - 1].stride < std::abs(stride); --place) {
      layout.dims[place] = layout.dims[place - 1];
    }
    layout.dims[place] = {.extent = view.shape[i], .stride = std::abs(stride)};
  }
  return layout;
}

// Can an element of `b`, whose begin lies `delta` bytes after that of `a`, overlap one of `a`?
// Only dimensions from `dim` on are left; each tried value of index_a - index_b moves b by one
// stride, and since inner dimensions span less than a stride only two values can matter.
bool may_overlap(const Layout& a, const Layout& b, int64_t delta, int dim) {
  const bool apart = delta >= a.span(dim) || -delta >= b.span(dim);
  if (apart) return false;
  if (dim >= a.num_dims || dim >= b.num_dims) return true;
  const int64_t stride = a.dims[dim].stride;
  if (stride != b.dims[dim].stride || stride < a.span(dim + 1) || stride < b.span(dim + 1)) {
    return true;
  }
  const int64_t floor = delta >= 0 ? delta / stride : -((-delta + stride - 1) / stride);
  for (int64_t shift : {floor, floor + 1}) {
    if (shift > a.dims[dim].extent - 1 || -shift > b.dims[dim].extent - 1) continue;
    if (may_overlap(a, b, delta - shift * stride, dim + 1)) return true;
  }
  return false;
}

bool same_view(const TensorView& a, const TensorView& b) {
  if (a.data != b.data || a.dtype != b.dtype || a.ndim != b.ndim) return false;
  for (int i = 0; i < a.ndim; ++i) {
    if (a.shape[i] != b.shape[i]) return false;
    if (a.shape[i] > 1 && a.strides[i] != b.strides[i]) return false;
  }
  return true;
}

void throw_if_overlapping(const char* op, NamedTensor written, NamedTensor other,
                          const char* exception) {
  if (written.view.numel() == 0 || other.view.numel() == 0) return;
  const Layout a = layout_of(written.view);
  const Layout b = layout_of(other.view);
  const int64_t delta = static_cast<int64_t>(b.begin - a.begin);
  ASTRAI_CHECK_ARG(!may_overlap(a, b, delta, 0), op, ": ", written.name, " overlaps ", other.name,
                   " in memory; expected separate memory", exception);
}

}  // namespace

void check_rank(const char* op, NamedTensor tensor, int ndim) {
  ASTRAI_CHECK_ARG(tensor.view.ndim == ndim, op, ": ", tensor.name, " has ", tensor.view.ndim,
                   " dimensions (shape ", tensor.view.shape_string(), "); expected ", ndim);
}

void check_dtype(const char* op, NamedTensor tensor, DType expected, std::string_view reason) {
  ASTRAI_CHECK_ARG(tensor.view.dtype == expected, op, ": ", tensor.name, " has dtype ",
                   dtype_name(tensor.view.dtype), "; expected ", dtype_name(expected),
                   reason.empty() ? "" : " ", reason);
}

void check_floating(const char* op, NamedTensor tensor) {
  ASTRAI_CHECK_ARG(is_floating(tensor.view.dtype), op, ": ", tensor.name, " has dtype ",
                   dtype_name(tensor.view.dtype), "; expected one of float32, float16, bfloat16");
}

void check_extent(const char* op, NamedTensor tensor, int dim, int64_t expected,
                  std::string_view rule) {
  ASTRAI_CHECK_ARG(tensor.view.shape[static_cast<size_t>(dim)] == expected, op, ": ", tensor.name,
                   " has shape ", tensor.view.shape_string(), "; expected ", expected,
                   " in dimension ", dim, ", ", rule);
}

void check_same_device(const char* op, NamedTensor first, std::initializer_list<NamedTensor> rest) {
  for (const NamedTensor& tensor : rest) {
    ASTRAI_CHECK_ARG(tensor.view.device == first.view.device, op, ": ", tensor.name, " is on ",
                     device_name(tensor.view.device), "; expected ", device_name(first.view.device),
                     ", where ", first.name, " is");
  }
}

void check_unit_last_stride(const char* op, NamedTensor tensor) {
  const TensorView& view = tensor.view;
  if (view.ndim == 0) return;
  const auto last = static_cast<size_t>(view.ndim - 1);
  ASTRAI_CHECK_ARG(view.shape[last] <= 1 || view.strides[last] == 1, op, ": ", tensor.name,
                   " has stride ", view.strides[last], " in its last dimension; expected 1");
}

void check_writable(const char* op, NamedTensor tensor) {
  if (tensor.view.numel() == 0) return;
  const Layout layout = layout_of(tensor.view);
  for (int i = 0; i < layout.num_dims; ++i) {
    ASTRAI_CHECK_ARG(layout.dims[i].stride >= layout.span(i + 1), op, ": ", tensor.name,
                     " is written but its elements overlap (a stride of ",
                     layout.dims[i].stride / layout.item_bytes, " over ",
                     layout.span(i + 1) / layout.item_bytes,
                     " elements); expected strides that keep elements apart");
  }
}

void check_disjoint(const char* op, NamedTensor written, NamedTensor other) {
  throw_if_overlapping(op, written, other, "");
}

void check_disjoint_or_same(const char* op, NamedTensor written, NamedTensor other) {
  if (same_view(written.view, other.view)) return;
  throw_if_overlapping(op, written, other, ", or the very same tensor");
}

}  // namespace astrai::kernels
