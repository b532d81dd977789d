// CUDA side of the attention entry points: plain C++, for attn_launch.cpp and for tests and benches
// that pick the kernel themselves.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "kernels/attention/attn_cuda_plan.h"
#include "kernels/attention/attn_params.h"

namespace astrai::kernels {

enum class DecodeVariant : uint8_t {
  kAuto,    // tensor cores where dtype and strides allow them
  kScalar,  // attn_decode_split_kv.cuh
  kNarrow,  // attn_decode_split_kv_mma.cuh in its narrow shape; refused where it cannot serve
  kWide,    // the same in its wide shape, where that is built and fits
};

struct DecodeLaunch {
  const char* op = "attn_decode";
  int device = 0;                 // CUDA device index of all tensors
  void* stream = nullptr;         // cudaStream_t
  int64_t fixed_split_keys = 0;   // > 0: see plan_decode_fixed
  int64_t max_kv_len = 0;         // > 0: no request of a paged batch is longer
  int64_t partials_capacity = 0;  // splits that params.o_part holds; ignored when it is null
};

// Makes later launches of this process use one kernel, for tests and benches. kAuto undoes it.
void force_decode_variant(DecodeVariant variant);

// The same for the largest cluster; 0 undoes it.
void force_decode_max_cluster(int64_t size);

enum class PrefillVariant : uint8_t {
  kAuto,    // tensor cores where dtype and strides allow them
  kScalar,  // attn_prefill_split_q.cuh
  kNarrow,  // attn_prefill_split_q_mma.cuh in its narrow shape, where it can serve
  kSplit,   // the same with two groups of warps for a row's keys, where that fits and can serve
  kWide,    // the same in its wide shape, where that is built, fits and can serve
};

struct PrefillLaunch {
  const char* op = "attn_prefill";
  int device = 0;          // CUDA device index of all tensors
  void* stream = nullptr;  // cudaStream_t
};

// Checked parameters in (attn_check.h); params.num_splits 0 = choose. Queues the decode kernel and,
// where a row is left in more than one partial, the combine kernel. Reads no device memory and
// waits for nothing; allocates stream-ordered scratch only when partials are needed and none were
// given. Throws std::runtime_error when CUDA fails or the build lacks code for the device.
void launch_attn_decode_cuda(AttentionParams params, const DecodeLaunch& launch);

// As force_decode_variant, for prefill; where the kernel asked for cannot serve, as kAuto.
void force_prefill_variant(PrefillVariant variant);

// Checked parameters in. Queues one kernel; reads no device memory, waits for nothing, allocates
// nothing. Throws as launch_attn_decode_cuda does.
void launch_attn_prefill_cuda(const AttentionParams& params, const PrefillLaunch& launch);

}  // namespace astrai::kernels
