// Device scratch of an inference run: one slab, cut into named slices whose addresses never change.
//
// Measure, then carve: plan_workspace() is a pure host function that turns a shape into slices and
// a byte count. The caller allocates exactly that many bytes and InferenceWorkspace cuts the slab
// along the same plan, so the two cannot disagree.
//
// Order of the slices in the slab:
//   input_ids                                   the tokens of a step, written by the caller
//   qo_indptr kv_indptr kv_lens last_rows
//   positions slot_mapping kv_indices           step metadata, written by PagePool::bind_tasks
//   temperature ... seeds                       sampling inputs, written when the batch changes
//   next_ids hidden logits                      outputs that a captured graph leaves behind
//   o_part ml_part                              partials of split-KV attention
// The first three groups are what the host writes. On a CPU it writes the slab itself; on any other
// device it writes a host mirror of that run, and one copy moves a part of it to the same offset
// of the slab.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/dtype.h"
#include "common/tensor_view.h"

namespace astrai::runtime {

// Every slice starts at a multiple of this many bytes, and so must the slab.
inline constexpr int64_t kWorkspaceAlignment = 256;

struct WorkspaceShape {
  int64_t num_q_heads = 0;
  int64_t num_kv_heads = 0;  // divides num_q_heads
  int64_t head_dim = 0;
  int64_t hidden_size = 0;        // width of the slice "hidden"; 0 leaves it out
  int64_t vocab_size = 0;         // width of the slice "logits"; 0 leaves it out
  int64_t max_batch = 0;          // tasks in a step, padding rows included
  int64_t max_context = 0;        // tokens of one task, prompt and output together
  int64_t max_step_tokens = 0;    // rows of a step over all its tasks; at least max_batch
  int64_t page_size = 16;         // tokens in a page
  int64_t max_splits = 16;        // KV splits of one (task, query head) in decode attention
  DType dtype = DType::kFloat32;  // of activations: float32, float16 or bfloat16

  bool operator==(const WorkspaceShape&) const = default;
};

struct WorkspaceSlice {
  std::string name;
  DType dtype = DType::kUInt8;
  int ndim = 0;
  std::array<int64_t, TensorView::kMaxDims> shape{};
  int64_t offset = 0;  // bytes from the slab's start, a multiple of kWorkspaceAlignment
  int64_t bytes = 0;   // numel * sizeof(element), without the padding up to the next slice
};

struct ByteRange {
  int64_t offset = 0;
  int64_t bytes = 0;
};

struct WorkspaceLayout {
  WorkspaceShape shape;
  std::vector<WorkspaceSlice> slices;  // by ascending offset
  int64_t total_bytes = 0;             // of the slab: the end of the last slice
  ByteRange step_metadata;    // what bind_tasks writes: qo_indptr up to the end of kv_indices
  ByteRange sampling_inputs;  // temperature up to the end of seeds
  // What the host writes: input_ids up to the end of the sampling inputs; starts at offset 0. A
  // host mirror has exactly this many bytes.
  ByteRange host_inputs;

  // Throws std::invalid_argument, listing the known names, when there is no such slice.
  const WorkspaceSlice& find(std::string_view name) const;
};

// The slices and bytes that `shape` needs. Needs no device and allocates no slab.
//   input_ids      [max_step_tokens] int64
//   qo_indptr      [max_batch + 1] int32     first row of each task in the step's rows
//   kv_indptr      [max_batch + 1] int32     first entry of each task in kv_indices
//   kv_lens        [max_batch] int32         tokens of each task, the step's new ones included
//   last_rows      [max_batch] int64         row of each task's last token
//   positions      [max_step_tokens] int64   position of each row in its task, from 0
//   slot_mapping   [max_step_tokens] int64   page * page_size + offset of each row; -1 = no slot
//   kv_indices     [max_batch * ceil(max_context / page_size)] int32   page ids
//   temperature, top_p, min_p, repetition_penalty, frequency_penalty, presence_penalty
//                  [max_batch] float32
//   top_k          [max_batch] int32
//   seeds          [max_batch] int64
//   next_ids       [max_batch] int64
//   hidden         [max_batch, hidden_size] dtype       absent when hidden_size is 0
//   logits         [max_batch, vocab_size] float32      absent when vocab_size is 0
//   o_part         [max_batch, num_q_heads, max_splits, head_dim] float32
//   ml_part        [max_batch, num_q_heads, max_splits, 2] float32
// Throws std::invalid_argument, with the values found, when a size is not positive,
// num_kv_heads does not divide num_q_heads, max_step_tokens < max_batch, dtype is not a float, an
// int32 index could overflow, or the byte count does not fit in 63 bits.
WorkspaceLayout plan_workspace(const WorkspaceShape& shape);

// Named views of a slab that the caller owns. The caller keeps slab and mirror alive.
class InferenceWorkspace {
 public:
  // `slab` is a contiguous uint8 tensor of exactly plan_workspace(shape).total_bytes bytes whose
  // address is a multiple of kWorkspaceAlignment. `host_mirror` is a contiguous uint8 CPU tensor of
  // exactly host_inputs.bytes bytes with the same alignment (pinned, for copies that overlap); it
  // is required when the slab is not on a CPU and refused when it is. Nothing is read or written.
  // Throws std::invalid_argument: "workspace: slab has N bytes; expected M", and the like.
  InferenceWorkspace(const WorkspaceShape& shape, const TensorView& slab,
                     const std::optional<TensorView>& host_mirror = std::nullopt);

  const WorkspaceShape& shape() const { return layout_.shape; }
  const WorkspaceLayout& layout() const { return layout_; }
  Device device() const { return slab_.device; }

  // The slice in the slab, contiguous, on the slab's device. Throws std::invalid_argument for an
  // unknown name.
  TensorView slice(std::string_view name) const;

  // The slice where the host writes it: in the mirror if there is one, else in the slab itself.
  // Only the slices in host_inputs have one; any other name throws std::invalid_argument.
  TensorView host_slice(std::string_view name) const;

  // True when what the host wrote must be copied to the slab, at the same offset, to take effect.
  bool has_host_mirror() const { return has_mirror_; }

  // Host addresses of the step metadata, for PagePool::bind_tasks.
  struct StepArrays {
    int32_t* qo_indptr = nullptr;
    int32_t* kv_indptr = nullptr;
    int32_t* kv_lens = nullptr;
    int64_t* last_rows = nullptr;
    int64_t* positions = nullptr;
    int64_t* slot_mapping = nullptr;
    int32_t* kv_indices = nullptr;
    int64_t kv_indices_capacity = 0;  // entries
    int64_t kv_indices_offset = 0;    // bytes from the start of the step metadata
  };
  const StepArrays& step_arrays() const { return step_arrays_; }

 private:
  static TensorView view_of(const WorkspaceSlice& slice, const TensorView& base);

  WorkspaceLayout layout_;
  TensorView slab_;
  TensorView host_;  // the mirror, or the slab
  bool has_mirror_ = false;
  StepArrays step_arrays_;
};

}  // namespace astrai::runtime
