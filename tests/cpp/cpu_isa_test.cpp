#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/cpu/isa.h"
#include "support/expect_error.h"

namespace astrai::kernels::cpu {
namespace {

std::string join(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

// Runs check in a child process with ASTRAI_CPU_ISA set, since a process decides only once.
// Returns the child's exit status: 0 when check returns true.
int run_with_isa(const std::string& value, const std::function<bool()>& check) {
  const pid_t child = fork();
  if (child == 0) {
    setenv("ASTRAI_CPU_ISA", value.c_str(), 1);
    bool passed = false;
    try {
      passed = check();
    } catch (...) {
      _exit(2);
    }
    _exit(passed ? 0 : 1);
  }
  int status = -1;
  if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status)) return -1;
  return WEXITSTATUS(status);
}

bool choosing_fails_with(const std::string& text) {
  try {
    cpu_kernels();
  } catch (const std::invalid_argument& error) {
    return error.what() == text;
  }
  return false;
}

// Must run before anything in this process chooses a set; gtest_discover_tests gives every test its
// own process.
TEST(CpuIsa, TheBestSupportedSetIsTheDefault) {
  EXPECT_EQ(run_with_isa("", [] { return cpu_kernels().isa == supported_isas().front(); }), 0);
}

TEST(CpuIsa, TheEnvironmentForcesASet) {
  for (const std::string& name : supported_isas()) {
    EXPECT_EQ(run_with_isa(name, [&] { return cpu_kernels().isa == name; }), 0) << name;
  }
}

TEST(CpuIsa, AnUnknownNameInTheEnvironmentIsRefused) {
  const std::string text =
      "ASTRAI_CPU_ISA: \"mmx\" is not compiled into this build; expected one of " +
      join(compiled_isas());
  EXPECT_EQ(run_with_isa("mmx", [&] { return choosing_fails_with(text); }), 0);
}

TEST(CpuIsa, ARefusedChoiceIsRefusedAgain) {
  const auto check = [] {
    for (int attempt = 0; attempt < 2; ++attempt) {
      try {
        cpu_kernels();
        return false;
      } catch (const std::invalid_argument&) {
      }
    }
    return true;
  };
  EXPECT_EQ(run_with_isa("mmx", check), 0);
}

TEST(CpuIsa, ASetThatTheProcessorLacksIsRefused) {
  const std::vector<std::string> supported = supported_isas();
  for (const std::string& name : compiled_isas()) {
    if (std::count(supported.begin(), supported.end(), name) != 0) continue;
    const std::string reason =
        "\"" + name + "\" is not supported by this processor; expected one of " + join(supported);
    EXPECT_EQ(run_with_isa(name, [&] { return choosing_fails_with("ASTRAI_CPU_ISA: " + reason); }),
              0);
    testing::expect_error<std::invalid_argument>("force_isa: " + reason, [&] { force_isa(name); });
  }
}

TEST(CpuIsa, SupportedSetsAreCompiledOnesInTheSameOrder) {
  const std::vector<std::string> compiled = compiled_isas();
  const std::vector<std::string> supported = supported_isas();
  ASSERT_FALSE(supported.empty());
  auto place = compiled.begin();
  for (const std::string& name : supported) {
    place = std::find(place, compiled.end(), name);
    ASSERT_NE(place, compiled.end()) << name;
  }
  // The baseline runs everywhere, and is the last resort.
  EXPECT_EQ(supported.back(), compiled.back());
}

TEST(CpuIsa, ForceIsaSwitchesAndRefusesUnknownNames) {
  for (const std::string& name : supported_isas()) {
    force_isa(name);
    EXPECT_EQ(cpu_kernels().isa, name);
  }
  const std::string before = cpu_kernels().isa;
  testing::expect_error<std::invalid_argument>(
      "force_isa: \"sse9\" is not compiled into this build; expected one of " +
          join(compiled_isas()),
      [] { force_isa("sse9"); });
  EXPECT_EQ(cpu_kernels().isa, before);
}

TEST(CpuIsa, EverySetHasEveryKernel) {
  for (const std::string& name : supported_isas()) {
    force_isa(name);
    const CpuKernels& kernels = cpu_kernels();
    EXPECT_NE(kernels.attn_decode, nullptr);
    EXPECT_NE(kernels.attn_prefill, nullptr);
    EXPECT_NE(kernels.rms_norm, nullptr);
    EXPECT_NE(kernels.silu_mul, nullptr);
    EXPECT_NE(kernels.rotary, nullptr);
    EXPECT_NE(kernels.linear, nullptr);
    EXPECT_NE(kernels.kv_write, nullptr);
  }
}

}  // namespace
}  // namespace astrai::kernels::cpu
