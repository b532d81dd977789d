// Where a kernel test runs: a device and, on the CPU, the instruction set that is forced there.
#pragma once

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/device.h"
#include "common/tensor_view.h"
#include "kernels/cpu/isa.h"

#if ASTRAI_WITH_CUDA
#include "kernels/attention/attn_cuda_launch.h"
#endif

namespace astrai::testing {

struct TestTarget {
  Device device;
  std::string isa;          // CPU only
  std::string kernel = "";  // CUDA only: the kernel that is forced, empty = the launcher's choice

  std::string name() const {
    if (device.type == DeviceType::kCpu) return "cpu/" + isa;
    return device_name(device) + (kernel.empty() ? "" : "/" + kernel);
  }

  void activate() const {
    if (device.type == DeviceType::kCpu) {
      kernels::cpu::force_isa(isa);
      return;
    }
#if ASTRAI_WITH_CUDA
    using kernels::DecodeVariant;
    using kernels::PrefillVariant;
    const bool scalar = kernel == "scalar";
    kernels::force_decode_variant(scalar ? DecodeVariant::kScalar : DecodeVariant::kAuto);
    kernels::force_prefill_variant(scalar               ? PrefillVariant::kScalar
                                   : kernel == "wide"   ? PrefillVariant::kWide
                                   : kernel == "narrow" ? PrefillVariant::kNarrow
                                                        : PrefillVariant::kAuto);
#endif
  }
};

// Why no case runs on a GPU; empty when they do.
inline std::string missing_gpu() {
  if (!built_with_cuda()) return "no GPU: this build has no CUDA kernels (ASTRAI_CUDA=OFF)";
  if (cuda_device_count() == 0) return "no GPU: the driver reports no CUDA device";
  return "";
}

// ASTRAI_REQUIRE_GPU=1: a machine without a GPU fails the kernel tests instead of passing on the
// CPU.
inline bool gpu_is_required() {
  const char* text = std::getenv("ASTRAI_REQUIRE_GPU");
  return text != nullptr && std::string(text) == "1";
}

// Every instruction set that this processor runs: for kernels that exist on the CPU alone.
inline std::vector<TestTarget> test_targets() {
  std::vector<TestTarget> targets;
  for (const std::string& isa : kernels::cpu::supported_isas()) {
    targets.push_back({.device = {}, .isa = isa});
  }
  return targets;
}

// The same, and the GPU's kernels where there is a GPU: for kernels that exist on both.
inline std::vector<TestTarget> all_test_targets() {
  std::vector<TestTarget> targets = test_targets();
  const std::string missing = missing_gpu();
  if (missing.empty()) {
    const Device gpu{DeviceType::kCuda, 0};
    targets.push_back({.device = gpu, .isa = ""});
    targets.push_back({.device = gpu, .isa = "", .kernel = "scalar"});
  } else if (gpu_is_required()) {
    throw std::runtime_error(missing + "; ASTRAI_REQUIRE_GPU=1 expects one");
  }
  return targets;
}

// The same for prefill, whose tensor-core kernel has shapes that only large batches get.
inline std::vector<TestTarget> prefill_test_targets() {
  std::vector<TestTarget> targets = all_test_targets();
  if (targets.back().device.type == DeviceType::kCuda) {
    const Device gpu = targets.back().device;
    targets.push_back({.device = gpu, .isa = "", .kernel = "narrow"});
    targets.push_back({.device = gpu, .isa = "", .kernel = "wide"});
  }
  return targets;
}

}  // namespace astrai::testing
