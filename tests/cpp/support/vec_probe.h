// Array versions of the vector helpers, compiled once per instruction set like the kernels, so that
// vec_test can call every set's copy.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace astrai::testing {

// count is a multiple of the lanes, except where stated.
struct VecProbe {
  const char* isa;
  int lanes;
  void (*exp)(const float* in, float* out, int64_t count);
  void (*round)(const float* in, float* out, int64_t count);
  void (*scale_by_pow2)(const float* in, const float* exponents, float* out, int64_t count);
  void (*widen_bf16)(const bf16* in, float* out, int64_t count);
  void (*widen_fp16)(const fp16* in, float* out, int64_t count);
  void (*narrow_bf16)(const float* in, bf16* out, int64_t count);
  void (*narrow_fp16)(const float* in, fp16* out, int64_t count);
  void (*max)(const float* a, const float* b, float* out, int64_t count);
  void (*min)(const float* a, const float* b, float* out, int64_t count);
  void (*select_lt)(const float* a, const float* b, float* out, int64_t count);  // a < b ? 1 : 2
  float (*reduce_add)(const float* in);                                          // over one vector
  float (*reduce_max)(const float* in);
  // 0 < count <= lanes, through vload_partial and vstore_partial.
  void (*copy_partial_fp32)(const float* in, float* out, int64_t count);
  void (*copy_partial_bf16)(const bf16* in, bf16* out, int64_t count);
};

const VecProbe& vec_probe_baseline();
const VecProbe& vec_probe_avx2();
const VecProbe& vec_probe_avx512();

}  // namespace astrai::testing
