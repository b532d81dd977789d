// The paged-cache runtime: workspace plan, page pool, step metadata, KV cache.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "bindings/module.h"
#include "bindings/tensor_arg.h"
#include "runtime/kv_cache.h"
#include "runtime/page_pool.h"
#include "runtime/step_metadata.h"
#include "runtime/workspace.h"

namespace astrai::bindings {

namespace {

using runtime::ByteRange;
using runtime::InferenceWorkspace;
using runtime::KVCache;
using runtime::PagePool;
using runtime::StepMetadata;
using runtime::WorkspaceLayout;
using runtime::WorkspaceShape;
using runtime::WorkspaceSlice;
using Ints = std::vector<int64_t>;

DType dtype_from_name(const std::string& name) {
  for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    if (dtype_name(dtype) == name) return dtype;
  }
  throw std::invalid_argument(
      concat("WorkspaceShape: dtype \"", name, "\"; expected one of float32, float16, bfloat16"));
}

std::string name_of(DType dtype) {
  return std::string(dtype_name(dtype));
}

std::pair<int64_t, int64_t> offset_and_bytes(const ByteRange& range) {
  return {range.offset, range.bytes};
}

void bind_workspace(nb::module_& module) {
  using nb::arg;
  nb::class_<WorkspaceShape>(module, "WorkspaceShape",
                             "Sizes that decide what a workspace holds. Checked by "
                             "plan_workspace; a wrong dtype name raises ValueError here.")
      .def(
          "__init__",
          [](WorkspaceShape* self, int64_t num_q_heads, int64_t num_kv_heads, int64_t head_dim,
             int64_t hidden_size, int64_t vocab_size, int64_t max_batch, int64_t max_context,
             int64_t max_step_tokens, int64_t page_size, int64_t max_splits,
             const std::string& dtype) {
            new (self) WorkspaceShape{.num_q_heads = num_q_heads,
                                      .num_kv_heads = num_kv_heads,
                                      .head_dim = head_dim,
                                      .hidden_size = hidden_size,
                                      .vocab_size = vocab_size,
                                      .max_batch = max_batch,
                                      .max_context = max_context,
                                      .max_step_tokens = max_step_tokens,
                                      .page_size = page_size,
                                      .max_splits = max_splits,
                                      .dtype = dtype_from_name(dtype)};
          },
          nb::kw_only(), arg("num_q_heads"), arg("num_kv_heads"), arg("head_dim"),
          arg("hidden_size") = 0, arg("vocab_size") = 0, arg("max_batch"), arg("max_context"),
          arg("max_step_tokens"), arg("page_size") = 16, arg("max_splits") = 16,
          arg("dtype") = "float32",
          "num_q_heads, num_kv_heads, head_dim  attention shape of the model\n"
          "hidden_size, vocab_size   widths of the slices hidden and logits; 0 leaves them out\n"
          "max_batch, max_step_tokens   tasks and rows of a step\n"
          "max_context   tokens of one task;  page_size  tokens of a page\n"
          "max_splits    KV splits of one (task, query head) in decode attention\n"
          "dtype         of activations: \"float32\", \"float16\" or \"bfloat16\"")
      .def_ro("num_q_heads", &WorkspaceShape::num_q_heads)
      .def_ro("num_kv_heads", &WorkspaceShape::num_kv_heads)
      .def_ro("head_dim", &WorkspaceShape::head_dim)
      .def_ro("hidden_size", &WorkspaceShape::hidden_size)
      .def_ro("vocab_size", &WorkspaceShape::vocab_size)
      .def_ro("max_batch", &WorkspaceShape::max_batch)
      .def_ro("max_context", &WorkspaceShape::max_context)
      .def_ro("max_step_tokens", &WorkspaceShape::max_step_tokens)
      .def_ro("page_size", &WorkspaceShape::page_size)
      .def_ro("max_splits", &WorkspaceShape::max_splits)
      .def_prop_ro("dtype", [](const WorkspaceShape& self) { return name_of(self.dtype); });

  nb::class_<WorkspaceSlice>(module, "WorkspaceSlice", "A named part of the slab.")
      .def_ro("name", &WorkspaceSlice::name)
      .def_prop_ro("dtype", [](const WorkspaceSlice& self) { return name_of(self.dtype); })
      .def_prop_ro("shape",
                   [](const WorkspaceSlice& self) {
                     return Ints(self.shape.begin(), self.shape.begin() + self.ndim);
                   })
      .def_ro("offset", &WorkspaceSlice::offset, "Bytes from the slab's start.")
      .def_ro("bytes", &WorkspaceSlice::bytes, "Bytes without the padding up to the next slice.");

  nb::class_<WorkspaceLayout>(module, "WorkspaceLayout", "Result of plan_workspace.")
      .def_ro("shape", &WorkspaceLayout::shape)
      .def_ro("slices", &WorkspaceLayout::slices, "All slices by ascending offset.")
      .def_ro("total_bytes", &WorkspaceLayout::total_bytes, "Exact size of the slab.")
      .def_prop_ro(
          "step_metadata",
          [](const WorkspaceLayout& self) { return offset_and_bytes(self.step_metadata); },
          "(offset, bytes) of what PagePool.bind_tasks writes.")
      .def_prop_ro(
          "sampling_inputs",
          [](const WorkspaceLayout& self) { return offset_and_bytes(self.sampling_inputs); },
          "(offset, bytes) of the sampling parameters.")
      .def_prop_ro(
          "host_inputs",
          [](const WorkspaceLayout& self) { return offset_and_bytes(self.host_inputs); },
          "(offset, bytes) of all that the host writes; the size of a host mirror.")
      .def(
          "find",
          [](const WorkspaceLayout& self, const std::string& name) { return self.find(name); },
          arg("name"), "The slice of that name. Raises ValueError listing the known names.");

  module.def("plan_workspace", &runtime::plan_workspace, arg("shape"),
             "Slices and bytes that a shape needs. Pure: needs no device, allocates no slab. "
             "Raises ValueError for a size out of range.");

  module.attr("WORKSPACE_ALIGNMENT") = runtime::kWorkspaceAlignment;

  nb::class_<InferenceWorkspace>(module, "InferenceWorkspace",
                                 "Named views of a slab that the caller allocated.")
      .def(
          "__init__",
          [](InferenceWorkspace* self, const WorkspaceShape& shape, TensorArg slab_arg,
             std::optional<TensorArg> mirror_arg) {
            const BorrowedTensor slab = borrow("workspace", "slab", slab_arg, Access::kWrite);
            const auto mirror = borrow("workspace", "host_mirror", mirror_arg, Access::kWrite);
            std::optional<TensorView> mirror_view;
            if (mirror) mirror_view = mirror->view();
            new (self) InferenceWorkspace(shape, slab, mirror_view);
          },
          arg("shape"), arg("slab"), arg("host_mirror").none() = nb::none(), nb::keep_alive<1, 3>(),
          nb::keep_alive<1, 4>(),
          "slab  contiguous uint8 of exactly plan_workspace(shape).total_bytes bytes, aligned to "
          "WORKSPACE_ALIGNMENT. host_mirror  the same kind of CPU tensor of host_inputs bytes; "
          "required when the slab is not on the CPU, refused when it is. Raises ValueError with "
          "both values when something differs.")
      .def_prop_ro("layout", &InferenceWorkspace::layout)
      .def_prop_ro("has_host_mirror", &InferenceWorkspace::has_host_mirror);
}

void bind_page_pool(nb::module_& module) {
  using nb::arg;
  nb::class_<StepMetadata>(module, "StepMetadata",
                           "Host facts of one step, as PagePool.bind_tasks found them.")
      .def_ro("num_tasks", &StepMetadata::num_tasks)
      .def_ro("num_tokens", &StepMetadata::num_tokens)
      .def_ro("num_rows", &StepMetadata::num_rows, "Tasks with padding.")
      .def_ro("num_row_tokens", &StepMetadata::num_row_tokens, "Tokens with padding.")
      .def_ro("max_q_len", &StepMetadata::max_q_len)
      .def_ro("max_kv_len", &StepMetadata::max_kv_len)
      .def_ro("num_pages_used", &StepMetadata::num_pages_used, "Entries of kv_indices.")
      .def_ro("metadata_bytes", &StepMetadata::metadata_bytes,
              "Used bytes from the start of the step_metadata range.")
      .def_ro("is_decode", &StepMetadata::is_decode, "Every task has one new token.");

  nb::class_<PagePool>(module, "PagePool",
                       "Pages with reference counts and the tasks that hold them. One thread "
                       "drives a pool.\n\n"
                       "Life of a step: try_reserve each task, take_page_copies and do them, "
                       "bind_tasks, run, append. Raises ValueError for a bad argument, an unknown "
                       "task id among them, with nothing changed; RuntimeError for a broken "
                       "invariant. Running out of pages is try_reserve's result False.")
      .def(nb::init<int64_t, int64_t, int64_t>(), arg("num_pages"), arg("page_size"),
           arg("max_task_tokens") = 0,
           "num_pages, page_size (tokens)  from 1 to 2^31 - 1. max_task_tokens  tokens for which "
           "a task's page list is reserved up front; no limit.")
      .def(
          "add_task",
          [](PagePool& self, int64_t task_id, const std::optional<Ints>& shared_pages,
             int64_t num_tokens) {
            if (!shared_pages && num_tokens == 0) return self.add_task(task_id);
            std::vector<int32_t> pages;
            if (shared_pages) {
              pages.reserve(shared_pages->size());
              for (int64_t page : *shared_pages) {
                ASTRAI_CHECK_ARG(page >= 0 && page < self.num_pages(), "add_task: shared page ",
                                 page, "; expected a page from 0 to ", self.num_pages() - 1);
                pages.push_back(static_cast<int32_t>(page));
              }
            }
            self.add_task(task_id, pages, num_tokens);
          },
          arg("task_id"), nb::kw_only(), arg("shared_pages").none() = nb::none(),
          arg("num_tokens") = 0,
          "A new task. With shared_pages its first num_tokens == len(shared_pages) * page_size "
          "tokens are those of these full pages, which other tasks hold at the same places.")
      .def(
          "match_prefix",
          [](const PagePool& self, const Ints& tokens, const std::string& salt) {
            const PagePool::PrefixMatch match = self.match_prefix(tokens, salt);
            return std::pair(match.num_tokens, match.num_unheld_pages);
          },
          arg("tokens"), arg("salt") = "",
          "(num_tokens, num_unheld_pages): how many of these tokens the prefix index holds under a "
          "salt, in whole pages and without the last token; and how many of those pages nobody "
          "holds, which adopt_prefix takes off the free ones.")
      .def(
          "adopt_prefix",
          [](PagePool& self, int64_t task_id, const Ints& tokens, const std::string& salt) {
            return self.adopt_prefix(task_id, tokens, salt);
          },
          arg("task_id"), arg("tokens"), arg("salt") = "",
          "A new task that begins with what match_prefix finds; returns its length in tokens.")
      .def(
          "index_prefix",
          [](PagePool& self, int64_t task_id, const Ints& tokens, const std::string& salt) {
            self.index_prefix(task_id, tokens, salt);
          },
          arg("task_id"), arg("tokens"), arg("salt") = "",
          "Puts the task's full pages into the prefix index. tokens are the task's from its first "
          "on, at least as many as its full pages hold.")
      .def(
          "extend_indexed",
          [](PagePool& self, int64_t task_id, int64_t first_token, const Ints& tokens) {
            return self.extend_indexed(task_id, first_token, tokens);
          },
          arg("task_id"), arg("first_token"), arg("tokens"),
          "index_prefix for what follows first_token, a multiple of the page size. False, with "
          "nothing changed, when the page before it is not in the index: index_prefix then takes "
          "all tokens.")
      .def("clear_prefixes", &PagePool::clear_prefixes,
           "Empties the prefix index; tasks keep their pages.")
      .def_prop_ro("num_indexed_pages", &PagePool::num_indexed_pages,
                   "Pages in the prefix index, held or free.")
      .def("fork", &PagePool::fork, arg("parent"), arg("child"),
           "A new task with the tokens and, shared, the pages of parent.")
      .def("try_reserve", &PagePool::try_reserve, arg("task_id"), arg("num_new_tokens"),
           "Makes room for tokens after the task's length; a shared page that the next token goes "
           "to is replaced and its copy queued. False, with nothing changed, when too few pages "
           "are free.")
      .def(
          "try_reserve_one_each",
          [](PagePool& self, const Ints& task_ids) { return self.try_reserve_one_each(task_ids); },
          arg("task_ids"),
          "try_reserve of one token for one task after the other, until one is refused: how many "
          "succeeded.")
      .def("append", &PagePool::append, arg("task_id"), arg("num_new_tokens"),
           "Counts tokens that a step has written into reserved pages.")
      .def(
          "append_each",
          [](PagePool& self, const Ints& task_ids, const Ints& nums_new_tokens) {
            self.append_each(task_ids, nums_new_tokens);
          },
          arg("task_ids"), arg("nums_new_tokens"), "append for each of several distinct tasks.")
      .def("truncate", &PagePool::truncate, arg("task_id"), arg("num_tokens"),
           "Shortens the task and lets go of all pages past its new length.")
      .def("free_task", &PagePool::free_task, arg("task_id"),
           "Forgets the task and lets go of its pages.")
      .def("has_task", &PagePool::has_task, arg("task_id"))
      .def("length", &PagePool::length, arg("task_id"), "Tokens of the task.")
      .def(
          "pages",
          [](const PagePool& self, int64_t task_id) {
            const auto pages = self.pages(task_id);
            return std::vector<int32_t>(pages.begin(), pages.end());
          },
          arg("task_id"), "Page ids of the task, in order.")
      .def("ref_count", &PagePool::ref_count, arg("page"), "Tasks that hold the page.")
      .def(
          "take_page_copies",
          [](PagePool& self) {
            std::vector<std::pair<int32_t, int32_t>> copies;
            for (const runtime::PageCopy& copy : self.take_page_copies()) {
              copies.emplace_back(copy.src, copy.dst);
            }
            return copies;
          },
          "Queued copies [(src, dst)], in the order in which they must be done, before the next "
          "step writes; the queue is empty afterwards.")
      .def(
          "bind_tasks",
          [](PagePool& self, const InferenceWorkspace& workspace, const Ints& task_ids,
             const Ints& q_lens,
             int64_t pad_to) { return self.bind_tasks(workspace, task_ids, q_lens, pad_to); },
          arg("workspace"), arg("task_ids"), arg("q_lens"), arg("pad_to") = 0,
          "Writes lengths, prefix sums, page lists, positions and slots of a step into the host "
          "arrays of the workspace, in one pass. pad_to > 0 pads the step to that many tasks with "
          "rows of slot -1 and length 0.")
      .def("check_integrity", &PagePool::check_integrity,
           "Recounts everything from the task lists; raises RuntimeError describing the first "
           "inconsistency.")
      .def_prop_ro("num_pages", &PagePool::num_pages)
      .def_prop_ro("page_size", &PagePool::page_size)
      .def_prop_ro("num_tasks", &PagePool::num_tasks)
      .def_prop_ro("num_free_pages", &PagePool::num_free_pages)
      .def_prop_ro("num_parked_pages", &PagePool::num_parked_pages,
                   "Pages that no task holds but that a queued copy still reads.")
      .def_prop_ro("num_pending_copies", &PagePool::num_pending_copies);
}

void bind_kv_cache(nb::module_& module) {
  using nb::arg;
  nb::class_<KVCache>(module, "KVCache",
                      "Paged storage of all layers with the pool and the workspace that go with "
                      "it. See astrai.kv_cache.KVCache.")
      .def(
          "__init__",
          [](KVCache* self, TensorArg k_arg, TensorArg v_arg, PagePool& pool,
             InferenceWorkspace& workspace) {
            const BorrowedTensor k = borrow("kv_cache", "k", k_arg, Access::kWrite);
            const BorrowedTensor v = borrow("kv_cache", "v", v_arg, Access::kWrite);
            new (self) KVCache(k, v, pool, workspace);
          },
          arg("k"), arg("v"), arg("pool"), arg("workspace"), nb::keep_alive<1, 2>(),
          nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(),
          "k, v  [num_layers, num_pages, page_size, num_kv_heads, head_dim] in the workspace's "
          "dtype and on its device. Raises ValueError with both values when something differs.")
      .def_prop_ro("num_layers", &KVCache::num_layers)
      .def(
          "bind",
          [](KVCache& self, const Ints& task_ids, const Ints& q_lens, int64_t pad_to) {
            return self.bind(task_ids, q_lens, pad_to);
          },
          arg("task_ids"), arg("q_lens"), arg("pad_to") = 0,
          "Does the queued page copies, then PagePool.bind_tasks.")
      .def("apply_page_copies", &KVCache::apply_page_copies,
           "Does the queued page copies in every layer. Raises RuntimeError on a device other "
           "than the CPU, if there is one to do.");
}

}  // namespace

void bind_runtime(nb::module_& module) {
  bind_workspace(module);
  bind_page_pool(module);
  bind_kv_cache(module);
}

}  // namespace astrai::bindings
