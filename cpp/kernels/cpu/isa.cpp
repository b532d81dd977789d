#include "kernels/cpu/isa.h"

#include <atomic>
#include <cstdlib>

#include "common/check.h"

namespace astrai::kernels::cpu {
namespace {

struct Isa {
  const char* name;
  const CpuKernels& (*kernels)();
  bool supported;
};

// Best first. What a set needs is what its compiler flags in CMakeLists.txt allow.
const std::vector<Isa>& isas() {
  static const std::vector<Isa> list = [] {
    std::vector<Isa> found;
#if ASTRAI_HAVE_AVX512
    found.push_back({"avx512", kernels_avx512,
                     __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                         __builtin_cpu_supports("avx512bf16") &&
                         __builtin_cpu_supports("avx512vnni")});
#endif
#if ASTRAI_HAVE_AVX2
    found.push_back({"avx2", kernels_avx2,
                     __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                         __builtin_cpu_supports("f16c")});
#endif
    // On Arm the baseline is NEON: the compiler's generic vectors become NEON registers.
    found.push_back({kernels_baseline().isa, kernels_baseline, true});
    return found;
  }();
  return list;
}

std::string join(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

const CpuKernels& find(const std::string& name, const char* op) {
  for (const Isa& isa : isas()) {
    if (name != isa.name) continue;
    ASTRAI_CHECK_ARG(isa.supported, op, ": \"", name,
                     "\" is not supported by this processor; expected one of ",
                     join(supported_isas()));
    return isa.kernels();
  }
  throw std::invalid_argument(concat(op, ": \"", name,
                                     "\" is not compiled into this build; "
                                     "expected one of ",
                                     join(compiled_isas())));
}

const CpuKernels& choose() {
  const char* forced = std::getenv("ASTRAI_CPU_ISA");
  if (forced != nullptr && *forced != '\0') return find(forced, "ASTRAI_CPU_ISA");
  for (const Isa& isa : isas()) {
    if (isa.supported) return isa.kernels();
  }
  return kernels_baseline();
}

std::atomic<const CpuKernels*> active{nullptr};

}  // namespace

std::vector<std::string> compiled_isas() {
  std::vector<std::string> names;
  for (const Isa& isa : isas()) names.emplace_back(isa.name);
  return names;
}

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const Isa& isa : isas()) {
    if (isa.supported) names.emplace_back(isa.name);
  }
  return names;
}

const CpuKernels& cpu_kernels() {
  const CpuKernels* kernels = active.load(std::memory_order_acquire);
  if (kernels == nullptr) [[unlikely]] {
    kernels = &choose();
    active.store(kernels, std::memory_order_release);
  }
  return *kernels;
}

void force_isa(const std::string& name) {
  active.store(&find(name, "force_isa"), std::memory_order_release);
}

}  // namespace astrai::kernels::cpu
