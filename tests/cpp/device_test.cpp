#include "common/device.h"

#include <gtest/gtest.h>

namespace astrai {
namespace {

TEST(ArchitectureRunsOn, TakesLaterMinorsOfTheSameMajor) {
  EXPECT_TRUE(architecture_runs_on("80", 8, 0));
  EXPECT_TRUE(architecture_runs_on("80", 8, 9));
  EXPECT_FALSE(architecture_runs_on("86", 8, 0));
  EXPECT_FALSE(architecture_runs_on("80", 9, 0));
  EXPECT_TRUE(architecture_runs_on("100", 10, 3));
  EXPECT_FALSE(architecture_runs_on("100", 12, 0));
  EXPECT_TRUE(architecture_runs_on("120", 12, 0));
}

TEST(ArchitectureRunsOn, ASuffixMeansExactlyThatOne) {
  EXPECT_TRUE(architecture_runs_on("90a", 9, 0));
  EXPECT_FALSE(architecture_runs_on("100a", 10, 3));
}

TEST(MissingCodeReason, NamesTheDeviceAndWhatWasBuilt) {
  const CudaDeviceFacts device{.name = "NVIDIA H200", .compute_major = 9, .compute_minor = 0};
  EXPECT_EQ(missing_code_reason(device, {"80", "90a"}), "");
  EXPECT_EQ(missing_code_reason(device, {"80", "120"}),
            "this build has no code for NVIDIA H200 (compute capability 9.0), only for "
            "architectures 80, 120; expected a build whose ASTRAI_CUDA_ARCHITECTURES includes 90");
}

TEST(CudaUnavailableReason, AgreesWithTheBuildAndTheDriver) {
  EXPECT_EQ(cuda_architectures().empty(), !built_with_cuda());
  for (const std::string& architecture : cuda_architectures()) {
    EXPECT_EQ(architecture.find_first_not_of("0123456789af"), std::string::npos) << architecture;
  }
  EXPECT_FALSE(cuda_unavailable_reason(cuda_device_count()).empty());
  if (!built_with_cuda()) {
    EXPECT_NE(cuda_unavailable_reason(0).find("configured without CUDA"), std::string::npos);
  } else if (cuda_device_count() == 0) {
    EXPECT_NE(cuda_unavailable_reason(0).find("no CUDA device"), std::string::npos);
  }
}

}  // namespace
}  // namespace astrai
