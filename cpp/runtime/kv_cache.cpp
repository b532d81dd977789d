#include "runtime/kv_cache.h"

#include <cstring>
#include <string>

#include "common/check.h"
#include "common/device.h"

namespace astrai::runtime {
namespace {

std::string dims_string(std::initializer_list<int64_t> dims) {
  return TensorView::contiguous(nullptr, DType::kUInt8, dims).shape_string();
}

void check_storage(const char* name, const TensorView& view, int64_t num_layers,
                   const PagePool& pool, const InferenceWorkspace& workspace) {
  const WorkspaceShape& shape = workspace.shape();
  ASTRAI_CHECK_ARG(view.ndim == 5, "kv_cache: ", name, " has shape ", view.shape_string(),
                   "; expected [num_layers, num_pages, page_size, num_kv_heads, head_dim]");
  const std::initializer_list<int64_t> expected = {num_layers, pool.num_pages(), pool.page_size(),
                                                   shape.num_kv_heads, shape.head_dim};
  const std::string expected_text = dims_string(expected);
  ASTRAI_CHECK_ARG(num_layers >= 1 && view.shape_string() == expected_text, "kv_cache: ", name,
                   " has shape ", view.shape_string(), "; expected ", expected_text,
                   num_layers >= 1 ? "" : " with at least one layer");
  ASTRAI_CHECK_ARG(view.dtype == shape.dtype, "kv_cache: ", name, " has dtype ",
                   dtype_name(view.dtype), "; expected ", dtype_name(shape.dtype),
                   ", that of the workspace");
  ASTRAI_CHECK_ARG(view.device == workspace.device(), "kv_cache: ", name, " is on ",
                   device_name(view.device), "; expected ", device_name(workspace.device()),
                   ", where the workspace is");
  ASTRAI_CHECK_ARG(view.shape[4] == 1 || view.strides[4] == 1, "kv_cache: ", name, " has stride ",
                   view.strides[4], " in head_dim; expected 1");
  for (int axis = 0; axis < 4; ++axis) {
    // Expanded storage would make two slots one.
    ASTRAI_CHECK_ARG(view.shape[axis] == 1 || view.strides[axis] != 0, "kv_cache: ", name,
                     " has stride 0 in axis ", axis, " of length ", view.shape[axis],
                     "; expected slots that do not share memory");
  }
  ASTRAI_CHECK_ARG(view.data != nullptr, "kv_cache: ", name,
                   " is a null pointer; expected storage of shape ", expected_text);
}

// View of one entry of the first axis.
TensorView select_first(const TensorView& view, int64_t index) {
  TensorView result;
  result.data = view.ptr<uint8_t>() + index * view.strides[0] * dtype_bytes(view.dtype);
  result.dtype = view.dtype;
  result.device = view.device;
  result.ndim = view.ndim - 1;
  for (int axis = 0; axis < result.ndim; ++axis) {
    result.shape[axis] = view.shape[axis + 1];
    result.strides[axis] = view.strides[axis + 1];
  }
  return result;
}

// Copies the first num_tokens rows of [page_size, num_kv_heads, head_dim].
void copy_tokens(const TensorView& src, const TensorView& dst, int64_t num_tokens) {
  const int64_t element = dtype_bytes(src.dtype);
  const auto row_bytes = static_cast<size_t>(src.shape[2] * element);
  for (int64_t token = 0; token < num_tokens; ++token) {
    for (int64_t head = 0; head < src.shape[1]; ++head) {
      // Source and destination are pages of the same tensor, so their strides are equal.
      const int64_t offset = (token * src.strides[0] + head * src.strides[1]) * element;
      std::memcpy(dst.ptr<uint8_t>() + offset, src.ptr<uint8_t>() + offset, row_bytes);
    }
  }
}

}  // namespace

KVCache::KVCache(const TensorView& k, const TensorView& v, PagePool& pool,
                 InferenceWorkspace& workspace)
    : k_(k), v_(v), pool_(&pool), workspace_(&workspace) {
  ASTRAI_CHECK_ARG(pool.page_size() == workspace.shape().page_size,
                   "kv_cache: the pool has page_size ", pool.page_size(), "; expected ",
                   workspace.shape().page_size, ", that of the workspace");
  check_storage("k", k, k.shape[0], pool, workspace);
  check_storage("v", v, k.shape[0], pool, workspace);
}

LayerPages KVCache::layer(int64_t index) const {
  ASTRAI_CHECK_ARG(index >= 0 && index < num_layers(), "kv_cache: layer ", index,
                   "; expected 0 to ", num_layers() - 1);
  return {.k_pages = select_first(k_, index), .v_pages = select_first(v_, index)};
}

const StepMetadata& KVCache::bind(std::span<const int64_t> task_ids,
                                  std::span<const int64_t> q_lens, int64_t pad_to) {
  apply_page_copies();
  step_ = pool_->bind_tasks(*workspace_, task_ids, q_lens, pad_to);
  return step_;
}

void KVCache::apply_page_copies() {
  if (pool_->num_pending_copies() == 0) return;
  if (k_.device.type != DeviceType::kCpu) throw_cuda_not_built("apply_page_copies");
  pool_->take_page_copies(copies_);
  for (const PageCopy& copy : copies_) {
    for (int64_t index = 0; index < num_layers(); ++index) {
      const LayerPages pages = layer(index);
      copy_tokens(select_first(pages.k_pages, copy.src), select_first(pages.k_pages, copy.dst),
                  copy.num_tokens);
      copy_tokens(select_first(pages.v_pages, copy.src), select_first(pages.v_pages, copy.dst),
                  copy.num_tokens);
    }
  }
}

}  // namespace astrai::runtime
