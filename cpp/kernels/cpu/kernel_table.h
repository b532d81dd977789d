// The CPU kernels of one instruction set. Every source in this folder that includes vec.h is
// compiled once per set, inside a namespace named after it; kernel_table.cpp of each set gathers
// the addresses.
#pragma once

namespace astrai::kernels {
struct AttentionParams;
struct RmsNormParams;
struct SiluMulParams;
struct RotaryParams;
struct LinearParams;
struct KvWriteParams;
}  // namespace astrai::kernels

namespace astrai::kernels::cpu {

// Parameters have been checked by the host entry points; these functions only compute. Each splits
// its work over the thread pool.
struct CpuKernels {
  const char* isa;
  void (*attn_decode)(const AttentionParams&);   // dense and paged, split over KV
  void (*attn_prefill)(const AttentionParams&);  // dense and paged (ragged), split over queries
  void (*rms_norm)(const RmsNormParams&);
  void (*silu_mul)(const SiluMulParams&);
  void (*rotary)(const RotaryParams&);
  void (*linear)(const LinearParams&);
  void (*kv_write)(const KvWriteParams&);
};

// Defined by kernel_table.cpp, once per compiled set.
const CpuKernels& kernels_baseline();
const CpuKernels& kernels_avx2();
const CpuKernels& kernels_avx512();

}  // namespace astrai::kernels::cpu
