#include "kernels/cpu/kernel_table.h"

#include "kernels/cpu/vec.h"

namespace astrai::kernels::cpu {

namespace ASTRAI_ISA {
void attn_decode(const AttentionParams& params);
void attn_prefill(const AttentionParams& params);
void rms_norm(const RmsNormParams& params);
void silu_mul(const SiluMulParams& params);
void rotary(const RotaryParams& params);
void linear(const LinearParams& params);
void kv_write(const KvWriteParams& params);
}  // namespace ASTRAI_ISA

#define ASTRAI_CONCAT_(a, b) a##b
#define ASTRAI_CONCAT(a, b) ASTRAI_CONCAT_(a, b)

const CpuKernels& ASTRAI_CONCAT(kernels_, ASTRAI_ISA)() {
  static constexpr CpuKernels table = {
      .isa = ASTRAI_ISA_NAME,
      .attn_decode = ASTRAI_ISA::attn_decode,
      .attn_prefill = ASTRAI_ISA::attn_prefill,
      .rms_norm = ASTRAI_ISA::rms_norm,
      .silu_mul = ASTRAI_ISA::silu_mul,
      .rotary = ASTRAI_ISA::rotary,
      .linear = ASTRAI_ISA::linear,
      .kv_write = ASTRAI_ISA::kv_write,
  };
  return table;
}

}  // namespace astrai::kernels::cpu
