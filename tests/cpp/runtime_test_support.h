// Helpers of the runtime tests: guarded slabs and error texts.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "common/tensor_view.h"
#include "runtime/workspace.h"

namespace astrai::runtime {

// The message of the E that fn throws; a test failure and "" when it throws none. Any other
// exception fails the test by itself.
template <class E, class Fn>
std::string message_of(Fn&& fn) {
  try {
    fn();
  } catch (const E& error) {
    return error.what();
  }
  ADD_FAILURE() << "expected an exception";
  return "";
}

inline void expect_contains(const std::string& text, std::string_view part) {
  EXPECT_NE(text.find(part), std::string::npos) << "\"" << text << "\" lacks \"" << part << "\"";
}

// Host memory of exactly `bytes` bytes at a multiple of 256, between two canaries.
class GuardedBuffer {
 public:
  static constexpr int64_t kGuardBytes = 256;
  static constexpr uint8_t kGuard = 0xc5;

  explicit GuardedBuffer(int64_t bytes)
      : bytes_(bytes), memory_(static_cast<size_t>(bytes + 3 * kGuardBytes), kGuard) {
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    start_ =
        static_cast<int64_t>((kGuardBytes - address % kGuardBytes) % kGuardBytes) + kGuardBytes;
  }

  uint8_t* data() { return memory_.data() + start_; }
  int64_t bytes() const { return bytes_; }

  TensorView view(Device device = {}) {
    return TensorView::contiguous(data(), DType::kUInt8, {bytes_}, device);
  }

  void fill(uint8_t value) { std::memset(data(), value, static_cast<size_t>(bytes_)); }

  std::vector<uint8_t> contents() { return {data(), data() + bytes_}; }

  bool guards_intact() const {
    for (int64_t i = 0; i < static_cast<int64_t>(memory_.size()); ++i) {
      const bool inside = i >= start_ && i < start_ + bytes_;
      if (!inside && memory_[static_cast<size_t>(i)] != kGuard) return false;
    }
    return true;
  }

 private:
  int64_t bytes_;
  std::vector<uint8_t> memory_;
  int64_t start_ = 0;
};

inline WorkspaceShape small_shape(int64_t page_size = 16) {
  return {.num_q_heads = 4,
          .num_kv_heads = 2,
          .head_dim = 8,
          .hidden_size = 32,
          .vocab_size = 50,
          .max_batch = 5,
          .max_context = 100,
          .max_step_tokens = 64,
          .page_size = page_size,
          .max_splits = 3,
          .dtype = DType::kFloat32};
}

// A CPU workspace with its slab.
struct TestWorkspace {
  explicit TestWorkspace(const WorkspaceShape& shape)
      : buffer(plan_workspace(shape).total_bytes), workspace(shape, buffer.view()) {}

  GuardedBuffer buffer;
  InferenceWorkspace workspace;
};

}  // namespace astrai::runtime
