// The four attention entry points. The checks are the kernels'.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "bindings/module.h"
#include "bindings/scalar_arg.h"
#include "bindings/tensor_arg.h"
#include "kernels/attention/attn_dispatch.h"
#include "kernels/attention/attn_launch.h"

namespace astrai::bindings {

namespace {

using OptionalArg = std::optional<TensorArg>;
using DenseEntry = void (*)(const TensorView&, const TensorView&, const TensorView&,
                            const TensorView&, int64_t, const kernels::AttentionOptions&);

// How a call cuts the keys.
struct Splits {
  int64_t num_splits = 0;
  int64_t fixed_split_keys = 0;
  int64_t max_kv_len = 0;
  bool match_decode = false;
};

// The optional tensors of a call, alive while their options are in use.
struct BorrowedOptions {
  BorrowedOptions(const char* op, OptionalArg mask_arg, IntArg window, FloatArg softcap,
                  OptionalArg sinks_arg, const std::optional<FloatArg>& scale, OptionalArg lse_arg,
                  OptionalArg o_part_arg, OptionalArg ml_part_arg, const Splits& splits,
                  void* stream)
      : mask(borrow(op, "mask", mask_arg)),
        sinks(borrow(op, "sinks", sinks_arg)),
        lse(borrow(op, "lse", lse_arg, Access::kWrite)),
        o_part(borrow(op, "o_part", o_part_arg, Access::kWrite)),
        ml_part(borrow(op, "ml_part", ml_part_arg, Access::kWrite)),
        values{.mask = view_or_null(mask),
               .window = read(op, "window", window),
               .softcap = read(op, "softcap", softcap),
               .sinks = view_or_null(sinks),
               .scale = read(op, "scale", scale),
               .lse = view_or_null(lse),
               .o_part = view_or_null(o_part),
               .ml_part = view_or_null(ml_part),
               .num_splits = splits.num_splits,
               .fixed_split_keys = splits.fixed_split_keys,
               .max_kv_len = splits.max_kv_len,
               .match_decode = splits.match_decode,
               .stream = stream} {}
  BorrowedOptions(const BorrowedOptions&) = delete;
  BorrowedOptions& operator=(const BorrowedOptions&) = delete;

  std::optional<BorrowedTensor> mask, sinks, lse, o_part, ml_part;
  kernels::AttentionOptions values;
};

void run_dense(const char* op, DenseEntry entry, const BorrowedTensor& q, TensorArg k_arg,
               TensorArg v_arg, TensorArg out_arg, IntArg causal_offset_arg,
               const BorrowedOptions& options) {
  const BorrowedTensor k = borrow(op, "k", k_arg);
  const BorrowedTensor v = borrow(op, "v", v_arg);
  const BorrowedTensor out = borrow(op, "out", out_arg, Access::kWrite);
  const int64_t causal_offset = read(op, "causal_offset", causal_offset_arg);
  nb::gil_scoped_release release;
  entry(q, k, v, out, causal_offset, options.values);
}

void bound_attn_decode(TensorArg q_arg, TensorArg k, TensorArg v, TensorArg out, OptionalArg mask,
                       IntArg causal_offset, IntArg window, FloatArg softcap, OptionalArg sinks,
                       const std::optional<FloatArg>& scale, OptionalArg lse, OptionalArg o_part,
                       OptionalArg ml_part, IntArg num_splits, IntArg fixed_split_keys,
                       IntArg max_kv_len, const StreamArg& stream) {
  constexpr const char* kOp = "attn_decode";
  const BorrowedTensor q = borrow(kOp, "q", q_arg);
  const BorrowedOptions options(
      kOp, mask, window, softcap, sinks, scale, lse, o_part, ml_part,
      {read(kOp, "num_splits", num_splits), read(kOp, "fixed_split_keys", fixed_split_keys),
       read(kOp, "max_kv_len", max_kv_len)},
      stream_for(kOp, stream, q_arg, q));
  run_dense(kOp, &kernels::attn_decode, q, k, v, out, causal_offset, options);
}

void bound_attn_prefill(TensorArg q_arg, TensorArg k, TensorArg v, TensorArg out, OptionalArg mask,
                        IntArg causal_offset, IntArg window, FloatArg softcap, OptionalArg sinks,
                        const std::optional<FloatArg>& scale, OptionalArg lse, OptionalArg o_part,
                        OptionalArg ml_part, IntArg num_splits, FlagArg match_decode,
                        const StreamArg& stream) {
  constexpr const char* kOp = "attn_prefill";
  const BorrowedTensor q = borrow(kOp, "q", q_arg);
  const BorrowedOptions options(kOp, mask, window, softcap, sinks, scale, lse, o_part, ml_part,
                                {.num_splits = read(kOp, "num_splits", num_splits),
                                 .match_decode = read(kOp, "match_decode", match_decode)},
                                stream_for(kOp, stream, q_arg, q));
  run_dense(kOp, &kernels::attn_prefill, q, k, v, out, causal_offset, options);
}

// Paged keys and values of a call, alive while their views are in use.
struct BorrowedPages {
  BorrowedPages(const char* op, TensorArg k_arg, TensorArg v_arg, TensorArg indptr_arg,
                TensorArg indices_arg, TensorArg lens_arg)
      : k_pages(borrow(op, "k_pages", k_arg)),
        v_pages(borrow(op, "v_pages", v_arg)),
        kv_indptr(borrow(op, "kv_indptr", indptr_arg)),
        kv_indices(borrow(op, "kv_indices", indices_arg)),
        kv_lens(borrow(op, "kv_lens", lens_arg)) {}

  kernels::PagedKv views() const { return {k_pages, v_pages, kv_indptr, kv_indices, kv_lens}; }

  BorrowedTensor k_pages, v_pages, kv_indptr, kv_indices, kv_lens;
};

void bound_attn_paged_decode(TensorArg q_arg, TensorArg k_pages, TensorArg v_pages,
                             TensorArg kv_indptr, TensorArg kv_indices, TensorArg kv_lens,
                             TensorArg out_arg, OptionalArg mask, IntArg window, FloatArg softcap,
                             OptionalArg sinks, const std::optional<FloatArg>& scale,
                             OptionalArg lse, OptionalArg o_part, OptionalArg ml_part,
                             IntArg num_splits, IntArg fixed_split_keys, IntArg max_kv_len,
                             const StreamArg& stream) {
  constexpr const char* kOp = "attn_paged_decode";
  const BorrowedTensor q = borrow(kOp, "q", q_arg);
  const BorrowedPages pages(kOp, k_pages, v_pages, kv_indptr, kv_indices, kv_lens);
  const BorrowedTensor out = borrow(kOp, "out", out_arg, Access::kWrite);
  const BorrowedOptions options(
      kOp, mask, window, softcap, sinks, scale, lse, o_part, ml_part,
      {read(kOp, "num_splits", num_splits), read(kOp, "fixed_split_keys", fixed_split_keys),
       read(kOp, "max_kv_len", max_kv_len)},
      stream_for(kOp, stream, q_arg, q));
  nb::gil_scoped_release release;
  kernels::attn_paged_decode(q, pages.views(), out, options.values);
}

void bound_attn_paged_prefill(TensorArg q_arg, TensorArg k_pages, TensorArg v_pages,
                              TensorArg qo_indptr_arg, TensorArg kv_indptr, TensorArg kv_indices,
                              TensorArg kv_lens, TensorArg out_arg, FlagArg causal_from_lengths,
                              IntArg causal_offset, OptionalArg causal_offsets_arg,
                              OptionalArg mask, IntArg window, FloatArg softcap, OptionalArg sinks,
                              const std::optional<FloatArg>& scale, OptionalArg lse,
                              OptionalArg o_part, OptionalArg ml_part, IntArg num_splits,
                              FlagArg match_decode, const StreamArg& stream) {
  constexpr const char* kOp = "attn_paged_prefill";
  const BorrowedTensor q = borrow(kOp, "q", q_arg);
  const BorrowedPages pages(kOp, k_pages, v_pages, kv_indptr, kv_indices, kv_lens);
  const BorrowedTensor qo_indptr = borrow(kOp, "qo_indptr", qo_indptr_arg);
  const BorrowedTensor out = borrow(kOp, "out", out_arg, Access::kWrite);
  const auto causal_offsets = borrow(kOp, "causal_offset", causal_offsets_arg);
  const kernels::PagedCausal causal{
      .from_lengths = read(kOp, "causal_from_lengths", causal_from_lengths),
      .offset = read(kOp, "causal_offset", causal_offset),
      .offsets = view_or_null(causal_offsets)};
  const BorrowedOptions options(kOp, mask, window, softcap, sinks, scale, lse, o_part, ml_part,
                                {.num_splits = read(kOp, "num_splits", num_splits),
                                 .match_decode = read(kOp, "match_decode", match_decode)},
                                stream_for(kOp, stream, q_arg, q));
  nb::gil_scoped_release release;
  kernels::attn_paged_prefill(q, pages.views(), qo_indptr, out, causal, options.values);
}

}  // namespace

void bind_attention(nb::module_& module) {
  using nb::arg;
  module.def(
      "attn_head_dims",
      [] {
        std::vector<int64_t> head_dims;
        kernels::for_each_head_dim([&](int64_t head_dim) { head_dims.push_back(head_dim); });
        return head_dims;
      },
      "Head dims that the attention kernels are compiled for, in rising order.");
  module.def("attn_decode", &bound_attn_decode, arg("q"), arg("k"), arg("v"), arg("out"),
             arg("mask").none(), arg("causal_offset"), arg("window"), arg("softcap"),
             arg("sinks").none(), arg("scale").none(), arg("lse").none(), arg("o_part").none(),
             arg("ml_part").none(), arg("num_splits"), arg("fixed_split_keys"), arg("max_kv_len"),
             arg("stream").none(),
             "Dense attention of one query a request, split over the keys; all tensors "
             "[B, L, H, D] by strides. See astrai.extension.ops.attn_decode.");
  module.def("attn_prefill", &bound_attn_prefill, arg("q"), arg("k"), arg("v"), arg("out"),
             arg("mask").none(), arg("causal_offset"), arg("window"), arg("softcap"),
             arg("sinks").none(), arg("scale").none(), arg("lse").none(), arg("o_part").none(),
             arg("ml_part").none(), arg("num_splits"), arg("match_decode"), arg("stream").none(),
             "Dense attention of many queries, split over the queries; all tensors "
             "[B, L, H, D] by strides. See astrai.extension.ops.attn_prefill.");
  module.def("attn_paged_decode", &bound_attn_paged_decode, arg("q"), arg("k_pages"),
             arg("v_pages"), arg("kv_indptr"), arg("kv_indices"), arg("kv_lens"), arg("out"),
             arg("mask").none(), arg("window"), arg("softcap"), arg("sinks").none(),
             arg("scale").none(), arg("lse").none(), arg("o_part").none(), arg("ml_part").none(),
             arg("num_splits"), arg("fixed_split_keys"), arg("max_kv_len"), arg("stream").none(),
             "Attention of one query a request over paged keys. See "
             "astrai.extension.ops.attn_paged_decode.");
  module.def("attn_paged_prefill", &bound_attn_paged_prefill, arg("q"), arg("k_pages"),
             arg("v_pages"), arg("qo_indptr"), arg("kv_indptr"), arg("kv_indices"), arg("kv_lens"),
             arg("out"), arg("causal_from_lengths"), arg("causal_offset"),
             arg("causal_offsets").none(), arg("mask").none(), arg("window"), arg("softcap"),
             arg("sinks").none(), arg("scale").none(), arg("lse").none(), arg("o_part").none(),
             arg("ml_part").none(), arg("num_splits"), arg("match_decode"), arg("stream").none(),
             "Ragged attention of many queries over paged keys. See "
             "astrai.extension.ops.attn_paged_prefill.");
}

}  // namespace astrai::bindings
