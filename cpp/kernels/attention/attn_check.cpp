#include "kernels/attention/attn_check.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>
#include <utility>

#include "common/check.h"
#include "kernels/attention/attn_dispatch.h"
#include "kernels/attention/attn_plan.h"

namespace astrai::kernels {
namespace {

// Larger windows and offsets mean the same as this one, and arithmetic on it cannot overflow.
constexpr int64_t kFarAway = int64_t{1} << 40;

std::string head_dim_list() {
  std::string text;
  for_each_head_dim([&](int64_t dim) { text += concat(text.empty() ? "" : ", ", dim); });
  return text;
}

bool is_supported_head_dim(int64_t head_dim) {
  bool found = false;
  for_each_head_dim([&](int64_t dim) { found |= dim == head_dim; });
  return found;
}

// True when two different indices may name the same element. Sorted by stride, each dimension must
// step over all that the smaller ones span.
bool may_overlap(const TensorView& view) {
  std::array<std::pair<int64_t, int64_t>, TensorView::kMaxDims> dims;  // |stride|, extent
  int count = 0;
  for (int i = 0; i < view.ndim; ++i) {
    if (view.shape[i] == 0) return false;
    if (view.shape[i] == 1) continue;
    const std::pair<int64_t, int64_t> dim{std::abs(view.strides[i]), view.shape[i]};
    int at = count++;
    for (; at > 0 && dim < dims[at - 1]; --at) dims[at] = dims[at - 1];
    dims[at] = dim;
  }
  int64_t span = 1;
  for (int i = 0; i < count; ++i) {
    if (dims[i].first < span) return true;
    span += dims[i].first * (dims[i].second - 1);
  }
  return false;
}

class Checker {
 public:
  Checker(const char* op, Device device) : op_(op), device_(device) {}

  void rank(const char* name, const TensorView& view, int ndim, const char* layout) const {
    ASTRAI_CHECK_ARG(view.ndim == ndim, op_, ": ", name, " has shape ", view.shape_string(),
                     "; expected ", ndim, " dimensions, ", layout);
  }

  void device(const char* name, const TensorView& view) const {
    ASTRAI_CHECK_ARG(view.device == device_, op_, ": ", name, " is on ", device_name(view.device),
                     "; expected ", device_name(device_), ", as q is");
  }

  void dtype(const char* name, const TensorView& view, DType expected) const {
    ASTRAI_CHECK_ARG(view.dtype == expected, op_, ": ", name, " has dtype ", dtype_name(view.dtype),
                     "; expected ", dtype_name(expected));
  }

  void extent(const char* name, const char* what, int64_t found, int64_t expected,
              const char* reason) const {
    ASTRAI_CHECK_ARG(found == expected, op_, ": ", name, " has ", what, " ", found, "; expected ",
                     expected, ", ", reason);
  }

  void contiguous(const char* name, const TensorView& view) const {
    ASTRAI_CHECK_ARG(view.is_contiguous(), op_, ": ", name, " of shape ", view.shape_string(),
                     " is not contiguous; expected a contiguous tensor");
  }

  // One-dimensional int32 metadata.
  void metadata(const char* name, const TensorView& view, int64_t num_entries) const {
    dtype(name, view, DType::kInt32);
    device(name, view);
    ASTRAI_CHECK_ARG(view.ndim == 1 && (num_entries < 0 || view.shape[0] == num_entries), op_, ": ",
                     name, " has shape ", view.shape_string(), "; expected ",
                     num_entries < 0 ? "one dimension" : concat("[", num_entries, "]"));
    contiguous(name, view);
  }

  // q, k, v or out: dtype, device, head dim and unit last stride. The head dim is the last one.
  void activation(const char* name, const TensorView& view, const TensorView& q) const {
    dtype(name, view, q.dtype);
    device(name, view);
    const int last = view.ndim - 1;
    extent(name, "head_dim", view.shape[last], q.shape[q.ndim - 1], "as q has");
    ASTRAI_CHECK_ARG(view.strides[last] == 1 || view.numel() == 0, op_, ": ", name, " has stride ",
                     view.strides[last], " in its last dimension; expected 1");
  }

  void q_tensor(const TensorView& q) const {
    ASTRAI_CHECK_ARG(is_floating(q.dtype), op_, ": q has dtype ", dtype_name(q.dtype),
                     "; expected float32, float16 or bfloat16");
    const int64_t head_dim = q.shape[q.ndim - 1];
    ASTRAI_CHECK_ARG(is_supported_head_dim(head_dim), op_, ": q has head_dim ", head_dim,
                     "; expected one of ", head_dim_list());
    activation("q", q, q);
  }

  void out_tensor(const TensorView& out, const TensorView& q) const {
    ASTRAI_CHECK_ARG(out.ndim == q.ndim &&
                         std::equal(q.shape.begin(), q.shape.begin() + q.ndim, out.shape.begin()),
                     op_, ": out has shape ", out.shape_string(), "; expected ", q.shape_string(),
                     ", as q has");
    activation("out", out, q);
    ASTRAI_CHECK_ARG(!may_overlap(out), op_, ": out of shape ", out.shape_string(),
                     " has rows that overlap in memory; expected strides that keep them apart");
  }

  void heads(int64_t num_q_heads, int64_t num_kv_heads) const {
    ASTRAI_CHECK_ARG(num_q_heads >= 1 && num_kv_heads >= 1, op_, ": q has ", num_q_heads,
                     " heads and k has ", num_kv_heads, "; expected at least 1 of each");
    ASTRAI_CHECK_ARG(num_q_heads % num_kv_heads == 0, op_, ": q has ", num_q_heads,
                     " heads; expected a multiple of the ", num_kv_heads, " KV heads");
  }

  void lse(AttentionParams& params, const TensorView* lse,
           std::initializer_list<int64_t> shape) const {
    if (lse == nullptr) return;
    const TensorView expected = TensorView::contiguous(nullptr, DType::kFloat32, shape);
    dtype("lse", *lse, DType::kFloat32);
    device("lse", *lse);
    ASTRAI_CHECK_ARG(lse->ndim == expected.ndim && lse->shape == expected.shape, op_,
                     ": lse has shape ", lse->shape_string(), "; expected ",
                     expected.shape_string());
    contiguous("lse", *lse);
    params.lse = lse->ptr<float>();
  }

  // `num_q` is the row count that a three-dimensional mask must have, `num_keys` the width that any
  // mask must have; a negative one leaves it open.
  void mask(AttentionParams& params, const TensorView* mask, int64_t num_q,
            int64_t num_keys) const {
    if (mask == nullptr) return;
    dtype("mask", *mask, DType::kBool);
    device("mask", *mask);
    const int last = mask->ndim - 1;
    const bool ok = (mask->ndim == 2 || mask->ndim == 3) && mask->shape[0] == params.num_requests &&
                    (num_keys < 0 || mask->shape[last] == num_keys) &&
                    (mask->ndim == 2 || num_q < 0 || mask->shape[1] == num_q);
    const std::string lq = num_q < 0 ? "queries" : concat(num_q);
    const std::string lk = num_keys < 0 ? "keys" : concat(num_keys);
    ASTRAI_CHECK_ARG(ok, op_, ": mask has shape ", mask->shape_string(), "; expected [",
                     params.num_requests, ", ", lk, "] or [", params.num_requests, ", ", lq, ", ",
                     lk, "]");
    params.mask = mask->ptr<uint8_t>();
    params.mask_stride_batch = mask->strides[0];
    params.mask_stride_kv = mask->strides[last];
    params.mask_kv_len = mask->shape[last];
    params.mask_q_len = mask->ndim == 3 ? mask->shape[1] : std::numeric_limits<int64_t>::max();
    params.mask_stride_q = mask->ndim == 3 ? mask->strides[1] : 0;
    // An empty mask has no address; the kernels then never look at it.
    static constexpr uint8_t kNothing = 0;
    if (params.mask == nullptr) params.mask = &kNothing;
  }

  void partials(AttentionParams& params, const AttentionOptions& options) const;
  void scores(AttentionParams& params, const AttentionOptions& options) const;

  const char* op() const { return op_; }

 private:
  const char* op_;
  Device device_;
};

void Checker::partials(AttentionParams& params, const AttentionOptions& options) const {
  ASTRAI_CHECK_ARG(options.num_splits >= 0 && options.num_splits <= kMaxSplits, op_,
                   ": num_splits is ", options.num_splits, "; expected 0 (choose) to ", kMaxSplits);
  params.num_splits = options.num_splits;
  ASTRAI_CHECK_ARG((options.o_part == nullptr) == (options.ml_part == nullptr), op_, ": ",
                   options.o_part == nullptr ? "ml_part" : "o_part",
                   " is given alone; expected o_part and ml_part, or neither");
  if (options.o_part == nullptr) return;
  const auto check = [&](const char* name, const TensorView& part, int64_t last) {
    dtype(name, part, DType::kFloat32);
    device(name, part);
    ASTRAI_CHECK_ARG(
        part.ndim == 4 && part.shape[0] >= params.num_requests &&
            part.shape[1] == params.num_q_heads && part.shape[2] >= 1 && part.shape[3] == last,
        op_, ": ", name, " has shape ", part.shape_string(), "; expected [>= ", params.num_requests,
        ", ", params.num_q_heads, ", splits >= 1, ", last, "]");
    contiguous(name, part);
  };
  check("o_part", *options.o_part, params.head_dim);
  check("ml_part", *options.ml_part, 2);
  const int64_t capacity = options.o_part->shape[2];
  extent("ml_part", "splits", options.ml_part->shape[2], capacity, "as o_part has");
  ASTRAI_CHECK_ARG(options.num_splits <= capacity, op_, ": num_splits is ", options.num_splits,
                   "; expected at most the ", capacity, " that o_part holds");
  params.o_part = options.o_part->ptr<float>();
  params.ml_part = options.ml_part->ptr<float>();
}

void Checker::scores(AttentionParams& params, const AttentionOptions& options) const {
  ASTRAI_CHECK_ARG(options.window >= 1 || options.window == -1, op_, ": window is ", options.window,
                   "; expected at least 1, or -1 for none");
  params.window = std::min(options.window, kFarAway);
  ASTRAI_CHECK_ARG(std::isfinite(options.softcap) && options.softcap >= 0.0f, op_, ": softcap is ",
                   options.softcap, "; expected a finite number >= 0 (0 = none)");
  params.softcap = options.softcap;
  params.scale = options.scale.value_or(1.0f / std::sqrt(static_cast<float>(params.head_dim)));
  ASTRAI_CHECK_ARG(std::isfinite(params.scale), op_, ": scale is ", params.scale,
                   "; expected a finite number");
  if (options.sinks != nullptr) {
    dtype("sinks", *options.sinks, DType::kFloat32);
    device("sinks", *options.sinks);
    ASTRAI_CHECK_ARG(options.sinks->ndim == 1 && options.sinks->shape[0] == params.num_q_heads, op_,
                     ": sinks has shape ", options.sinks->shape_string(), "; expected [",
                     params.num_q_heads, "], one for each query head");
    contiguous("sinks", *options.sinks);
    params.sinks = options.sinks->ptr<float>();
  }
}

// What the CPU can read of the page lists: each request's pages lie inside kv_indices, hold its
// length, and are pages of the pool.
void check_page_lists(const Checker& check, AttentionParams& params, int64_t num_indices) {
  const char* op = check.op();
  int64_t longest = 0;
  for (int64_t b = 0; b < params.num_requests; ++b) {
    const int64_t begin = params.kv_indptr[b];
    const int64_t end = params.kv_indptr[b + 1];
    ASTRAI_CHECK_ARG(begin >= 0 && begin <= end && end <= num_indices, op, ": kv_indptr[", b,
                     "] is ", begin, " and kv_indptr[", b + 1, "] is ", end,
                     "; expected rising offsets from 0 to at most the ", num_indices,
                     " entries of kv_indices");
    const int64_t kv_len = params.kv_lens[b];
    const int64_t used = (kv_len + params.page_size - 1) / params.page_size;
    ASTRAI_CHECK_ARG(kv_len >= 0 && used <= end - begin, op, ": kv_lens[", b, "] is ", kv_len,
                     "; expected 0 to ", (end - begin) * params.page_size, ", what the ",
                     end - begin, " pages of the request hold");
    const int32_t* pages = params.kv_indices + begin;
    bool wild = false;
    for (int64_t i = 0; i < used; ++i) wild |= pages[i] < 0 || pages[i] >= params.num_pages;
    for (int64_t i = 0; wild && i < used; ++i) {
      ASTRAI_CHECK_ARG(pages[i] >= 0 && pages[i] < params.num_pages, op, ": kv_indices[", begin + i,
                       "] is ", pages[i], "; expected a page id below ", params.num_pages);
    }
    longest = std::max(longest, kv_len);
  }
  params.kv_len = longest;
}

void check_query_ranges(const Checker& check, AttentionParams& params) {
  const char* op = check.op();
  const int32_t* indptr = params.qo_indptr;
  ASTRAI_CHECK_ARG(indptr[0] == 0, op, ": qo_indptr[0] is ", indptr[0], "; expected 0");
  int64_t longest = 0;
  for (int64_t b = 0; b < params.num_requests; ++b) {
    ASTRAI_CHECK_ARG(indptr[b] <= indptr[b + 1], op, ": qo_indptr[", b + 1, "] is ", indptr[b + 1],
                     "; expected at least the ", indptr[b], " before it");
    longest = std::max<int64_t>(longest, indptr[b + 1] - indptr[b]);
  }
  const int64_t total = indptr[params.num_requests];
  ASTRAI_CHECK_ARG(total == params.num_q_rows, op, ": qo_indptr ends at ", total, "; expected ",
                   params.num_q_rows, ", the rows of q");
  params.q_len = longest;
}

void set_causal(const Checker& check, AttentionParams& params, const PagedCausal& causal,
                bool read_contents) {
  if (causal.offsets != nullptr) {
    check.metadata("causal_offset", *causal.offsets, params.num_requests);
    params.causal_mode = CausalMode::kPerRequest;
    params.causal_offsets = causal.offsets->ptr<int32_t>();
    for (int64_t b = 0; read_contents && b < params.num_requests; ++b) {
      ASTRAI_CHECK_ARG(params.causal_offsets[b] >= -1, check.op(), ": causal_offset[", b, "] is ",
                       params.causal_offsets[b], "; expected at least 0, or -1 for not causal");
    }
    return;
  }
  if (causal.from_lengths) {
    params.causal_mode = CausalMode::kFromLengths;
    return;
  }
  ASTRAI_CHECK_ARG(causal.offset >= -1, check.op(), ": causal_offset is ", causal.offset,
                   "; expected at least 0, or -1 for not causal");
  params.causal_mode = causal.offset == kNotCausal ? CausalMode::kNone : CausalMode::kFixed;
  params.causal_offset = std::min(causal.offset, kFarAway);
}

}  // namespace

AttentionParams attn_pack_dense_params(const char* op, const TensorView& q, const TensorView& k,
                                       const TensorView& v, const TensorView& out,
                                       int64_t causal_offset, const AttentionOptions& options) {
  const Checker check(op, q.device);
  check.rank("q", q, 4, "[batch, q_len, q_heads, head_dim]");
  check.q_tensor(q);
  for (const auto& [name, view] : {std::pair{"k", &k}, std::pair{"v", &v}}) {
    check.rank(name, *view, 4, "[batch, kv_len, kv_heads, head_dim]");
    check.activation(name, *view, q);
    check.extent(name, "batch", view->shape[0], q.shape[0], "as q has");
  }
  check.extent("v", "kv_len", v.shape[1], k.shape[1], "as k has");
  check.extent("v", "kv_heads", v.shape[2], k.shape[2], "as k has");
  check.heads(q.shape[2], k.shape[2]);
  check.out_tensor(out, q);
  ASTRAI_CHECK_ARG(causal_offset >= -1, op, ": causal_offset is ", causal_offset,
                   "; expected at least 0, or -1 for not causal");

  AttentionParams params{
      .q = q.data,
      .k = k.data,
      .v = v.data,
      .out = out.data,
      .dtype = q.dtype,
      .num_requests = q.shape[0],
      .num_q_rows = q.shape[0] * q.shape[1],
      .q_len = q.shape[1],
      .kv_len = k.shape[1],
      .num_q_heads = q.shape[2],
      .num_kv_heads = k.shape[2],
      .head_dim = q.shape[3],
      .q_stride_batch = q.strides[0],
      .q_stride_token = q.strides[1],
      .q_stride_head = q.strides[2],
      .k_stride_batch = k.strides[0],
      .k_stride_token = k.strides[1],
      .k_stride_head = k.strides[2],
      .v_stride_batch = v.strides[0],
      .v_stride_token = v.strides[1],
      .v_stride_head = v.strides[2],
      .out_stride_batch = out.strides[0],
      .out_stride_token = out.strides[1],
      .out_stride_head = out.strides[2],
      .lse_stride_batch = q.shape[1] * q.shape[2],
      .lse_stride_token = 1,
      .lse_stride_head = q.shape[1],
      .causal_mode = causal_offset == kNotCausal ? CausalMode::kNone : CausalMode::kFixed,
      .causal_offset = std::min(causal_offset, kFarAway),
  };
  check.scores(params, options);
  check.mask(params, options.mask, params.q_len, params.kv_len);
  check.lse(params, options.lse, {params.num_requests, params.num_q_heads, params.q_len});
  check.partials(params, options);
  return params;
}

AttentionParams attn_pack_paged_params(const char* op, const TensorView& q, const PagedKv& kv,
                                       const TensorView* qo_indptr, const TensorView& out,
                                       const PagedCausal& causal, const AttentionOptions& options) {
  const Checker check(op, q.device);
  const bool ragged = qo_indptr != nullptr;
  const int head_axis = q.ndim - 2;
  if (ragged) {
    check.rank("q", q, 3, "[tokens, q_heads, head_dim]");
  } else {
    ASTRAI_CHECK_ARG(q.ndim == 3 || (q.ndim == 4 && q.shape[1] == 1), op, ": q has shape ",
                     q.shape_string(),
                     "; expected [batch, q_heads, head_dim] or [batch, 1, q_heads, head_dim]");
  }
  check.q_tensor(q);
  const TensorView& k = kv.k_pages;
  const TensorView& v = kv.v_pages;
  for (const auto& [name, view] : {std::pair{"k_pages", &k}, std::pair{"v_pages", &v}}) {
    check.rank(name, *view, 4, "[pages, page_size, kv_heads, head_dim]");
    check.activation(name, *view, q);
  }
  check.extent("v_pages", "page count", v.shape[0], k.shape[0], "as k_pages has");
  check.extent("v_pages", "page_size", v.shape[1], k.shape[1], "as k_pages has");
  check.extent("v_pages", "kv_heads", v.shape[2], k.shape[2], "as k_pages has");
  ASTRAI_CHECK_ARG(k.shape[1] >= 1, op, ": k_pages has page_size ", k.shape[1],
                   "; expected at least 1");
  check.heads(q.shape[head_axis], k.shape[2]);
  check.out_tensor(out, q);

  check.metadata("kv_lens", kv.kv_lens, ragged ? -1 : q.shape[0]);
  const int64_t num_requests = kv.kv_lens.shape[0];
  check.metadata("kv_indptr", kv.kv_indptr, num_requests + 1);
  check.metadata("kv_indices", kv.kv_indices, -1);
  if (ragged) check.metadata("qo_indptr", *qo_indptr, num_requests + 1);

  AttentionParams params{
      .q = q.data,
      .k = k.data,
      .v = v.data,
      .out = out.data,
      .dtype = q.dtype,
      .num_requests = num_requests,
      .num_q_rows = q.shape[0],
      .q_len = ragged ? q.shape[0] : 1,
      .kv_len = kv.kv_indices.shape[0] * k.shape[1],
      .num_q_heads = q.shape[head_axis],
      .num_kv_heads = k.shape[2],
      .head_dim = k.shape[3],
      .q_stride_batch = ragged ? 0 : q.strides[0],
      .q_stride_token = ragged ? q.strides[0] : 0,
      .q_stride_head = q.strides[head_axis],
      .k_stride_batch = k.strides[0],
      .k_stride_token = k.strides[1],
      .k_stride_head = k.strides[2],
      .v_stride_batch = v.strides[0],
      .v_stride_token = v.strides[1],
      .v_stride_head = v.strides[2],
      .out_stride_batch = ragged ? 0 : out.strides[0],
      .out_stride_token = ragged ? out.strides[0] : 0,
      .out_stride_head = out.strides[head_axis],
      .lse_stride_batch = ragged ? 0 : q.shape[head_axis],
      .lse_stride_token = ragged ? q.shape[head_axis] : 0,
      .lse_stride_head = 1,
      .page_size = k.shape[1],
      .num_pages = k.shape[0],
      .kv_indptr = kv.kv_indptr.ptr<int32_t>(),
      .kv_indices = kv.kv_indices.ptr<int32_t>(),
      .kv_lens = kv.kv_lens.ptr<int32_t>(),
      .qo_indptr = ragged ? qo_indptr->ptr<int32_t>() : nullptr,
  };
  const bool on_cpu = q.device.type == DeviceType::kCpu;
  check.scores(params, options);
  check.lse(params, options.lse, {params.num_q_rows, params.num_q_heads});
  check.partials(params, options);
  set_causal(check, params, causal, on_cpu);
  if (on_cpu) {
    check_page_lists(check, params, kv.kv_indices.shape[0]);
    if (ragged) check_query_ranges(check, params);
  }
  // A step's longest query count is known on the host only where the lengths are.
  check.mask(params, options.mask, ragged && !on_cpu ? -1 : params.q_len, -1);
  return params;
}

}  // namespace astrai::kernels
