#include "kernels/kv_cache/kv_write.h"

#include "common/check.h"
#include "common/counters.h"
#include "common/device.h"
#include "kernels/common/tensor_check.h"
#include "kernels/cpu/isa.h"

#if ASTRAI_WITH_CUDA
#include "kernels/kv_cache/kv_write_cuda_launch.h"
#endif

namespace astrai::kernels {
namespace {

void check_new_rows(const char* op, NamedTensor rows, const TensorView& k,
                    const TensorView& k_pages) {
  check_rank(op, rows, 3);
  check_dtype(op, rows, k_pages.dtype, "as k_pages");
  check_extent(op, rows, 0, k.shape[0], "the tokens of k");
  check_extent(op, rows, 1, k_pages.shape[2], "the heads of k_pages");
  check_extent(op, rows, 2, k_pages.shape[3], "the head dim of k_pages");
  check_unit_last_stride(op, rows);
}

void check_pages(const char* op, NamedTensor pages, const TensorView& k_pages) {
  check_rank(op, pages, 4);
  check_floating(op, pages);
  check_dtype(op, pages, k_pages.dtype, "as k_pages");
  for (int dim = 0; dim < 4; ++dim) {
    check_extent(op, pages, dim, k_pages.shape[static_cast<size_t>(dim)], "as k_pages");
  }
  check_unit_last_stride(op, pages);
  check_writable(op, pages);
}

void check_slots(const char* op, const TensorView& slot_mapping, int64_t num_slots) {
  const int64_t* slots = slot_mapping.ptr<int64_t>();
  for (int64_t token = 0; token < slot_mapping.shape[0]; ++token) {
    ASTRAI_CHECK_ARG(slots[token] >= -1 && slots[token] < num_slots, op, ": slot_mapping[", token,
                     "] is ", slots[token], "; expected -1 (skip) or 0 to ", num_slots - 1,
                     ", the slots of k_pages");
  }
}

}  // namespace

KvWriteParams pack_kv_write_params(const char* op, const TensorView& k, const TensorView& v,
                                   const TensorView& k_pages, const TensorView& v_pages,
                                   const TensorView& slot_mapping) {
  check_rank(op, {"k", k}, 3);
  check_rank(op, {"k_pages", k_pages}, 4);
  check_pages(op, {"k_pages", k_pages}, k_pages);
  check_pages(op, {"v_pages", v_pages}, k_pages);
  check_new_rows(op, {"k", k}, k, k_pages);
  check_new_rows(op, {"v", v}, k, k_pages);
  check_rank(op, {"slot_mapping", slot_mapping}, 1);
  check_dtype(op, {"slot_mapping", slot_mapping}, DType::kInt64);
  check_extent(op, {"slot_mapping", slot_mapping}, 0, k.shape[0], "the tokens of k");
  check_unit_last_stride(op, {"slot_mapping", slot_mapping});
  check_same_device(
      op, {"k", k},
      {{"v", v}, {"k_pages", k_pages}, {"v_pages", v_pages}, {"slot_mapping", slot_mapping}});
  check_disjoint(op, {"k_pages", k_pages}, {"v_pages", v_pages});
  for (const NamedTensor& pages : {NamedTensor{"k_pages", k_pages}, {"v_pages", v_pages}}) {
    check_disjoint(op, pages, {"k", k});
    check_disjoint(op, pages, {"v", v});
    check_disjoint(op, pages, {"slot_mapping", slot_mapping});
  }
  const bool on_cpu = k.device.type == DeviceType::kCpu;
  if (on_cpu) check_slots(op, slot_mapping, k_pages.shape[0] * k_pages.shape[1]);
  return {
      .k = k.data,
      .v = v.data,
      .k_pages = k_pages.data,
      .v_pages = v_pages.data,
      .slot_mapping = slot_mapping.ptr<int64_t>(),
      .dtype = k_pages.dtype,
      .num_tokens = k.shape[0],
      .num_kv_heads = k.shape[1],
      .head_dim = k.shape[2],
      .num_pages = k_pages.shape[0],
      .page_size = k_pages.shape[1],
      .k_stride_token = k.strides[0],
      .k_stride_head = k.strides[1],
      .v_stride_token = v.strides[0],
      .v_stride_head = v.strides[1],
      .k_pages_stride_page = k_pages.strides[0],
      .k_pages_stride_token = k_pages.strides[1],
      .k_pages_stride_head = k_pages.strides[2],
      .v_pages_stride_page = v_pages.strides[0],
      .v_pages_stride_token = v_pages.strides[1],
      .v_pages_stride_head = v_pages.strides[2],
  };
}

void kv_write(const TensorView& k, const TensorView& v, const TensorView& k_pages,
              const TensorView& v_pages, const TensorView& slot_mapping,
              [[maybe_unused]] void* stream) {
  constexpr const char* op = "kv_write";
  const KvWriteParams params = pack_kv_write_params(op, k, v, k_pages, v_pages, slot_mapping);
  if (k.numel() == 0) return;
  if (k.device.type == DeviceType::kCuda) {
#if ASTRAI_WITH_CUDA
    launch_kv_write_cuda(params, k.device.index, stream);
    return;
#else
    throw_cuda_not_built(op);
#endif
  }
  count(counters().launches);
  cpu::cpu_kernels().kv_write(params);
}

}  // namespace astrai::kernels
