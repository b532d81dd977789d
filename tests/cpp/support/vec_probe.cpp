#include "support/vec_probe.h"

#include "kernels/cpu/vec.h"
#include "kernels/cpu/vec_partial.h"

namespace astrai::kernels::cpu::ASTRAI_ISA {
namespace {

constexpr int64_t kLanes = VecF::kLanes;

void probe_exp(const float* in, float* out, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) vstore(out + i, vexp(vload(in + i)));
}

void probe_round(const float* in, float* out, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) vstore(out + i, vround(vload(in + i)));
}

void probe_scale(const float* in, const float* exponents, float* out, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    vstore(out + i, vscale_by_pow2(vload(in + i), vload(exponents + i)));
  }
}

template <class From, class To>
void probe_convert(const From* in, To* out, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) vstore(out + i, vload(in + i));
}

void probe_max(const float* a, const float* b, float* out, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) vstore(out + i, vmax(vload(a + i), vload(b + i)));
}

void probe_min(const float* a, const float* b, float* out, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) vstore(out + i, vmin(vload(a + i), vload(b + i)));
}

void probe_select_lt(const float* a, const float* b, float* out, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    vstore(out + i, vselect_lt(vload(a + i), vload(b + i), vset1(1.0f), vset1(2.0f)));
  }
}

float probe_reduce_add(const float* in) {
  return vreduce_add(vload(in));
}

float probe_reduce_max(const float* in) {
  return vreduce_max(vload(in));
}

template <class T>
void probe_partial(const T* in, T* out, int64_t count) {
  vstore_partial(out, vload_partial(in, count), count);
}

}  // namespace

const testing::VecProbe& vec_probe() {
  static constexpr testing::VecProbe probe = {
      .isa = ASTRAI_ISA_NAME,
      .lanes = VecF::kLanes,
      .exp = probe_exp,
      .round = probe_round,
      .scale_by_pow2 = probe_scale,
      .widen_bf16 = probe_convert<bf16, float>,
      .widen_fp16 = probe_convert<fp16, float>,
      .narrow_bf16 = probe_convert<float, bf16>,
      .narrow_fp16 = probe_convert<float, fp16>,
      .max = probe_max,
      .min = probe_min,
      .select_lt = probe_select_lt,
      .reduce_add = probe_reduce_add,
      .reduce_max = probe_reduce_max,
      .copy_partial_fp32 = probe_partial<float>,
      .copy_partial_bf16 = probe_partial<bf16>,
  };
  return probe;
}

}  // namespace astrai::kernels::cpu::ASTRAI_ISA

namespace astrai::testing {

#define ASTRAI_CONCAT_(a, b) a##b
#define ASTRAI_CONCAT(a, b) ASTRAI_CONCAT_(a, b)

const VecProbe& ASTRAI_CONCAT(vec_probe_, ASTRAI_ISA)() {
  return kernels::cpu::ASTRAI_ISA::vec_probe();
}

}  // namespace astrai::testing
