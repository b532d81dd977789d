// Random numbers for tests: reproducible, and the seed can be chosen from outside.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

namespace astrai::testing {

// ASTRAI_TEST_SEED, or 1. Tests that use it name it in their failure messages.
inline uint64_t test_seed() {
  const char* text = std::getenv("ASTRAI_TEST_SEED");
  return text == nullptr || *text == '\0' ? 1 : std::strtoull(text, nullptr, 10);
}

// splitmix64: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 0x1234567u) {}

  uint64_t bits() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

  // In [0, n).
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }

  // Close to a normal variable with mean 0 and variance 1: the sum of four uniform ones.
  float normal() {
    const uint64_t b = bits();
    float sum = 0.0f;
    for (int i = 0; i < 4; ++i) sum += static_cast<float>((b >> (16 * i)) & 0xffffu);
    return (sum / 65535.0f - 2.0f) * 1.7320508f;
  }

  template <class T>
  void shuffle(std::vector<T>& items) {
    for (size_t i = items.size(); i > 1; --i) {
      std::swap(items[i - 1], items[static_cast<size_t>(below(static_cast<int64_t>(i)))]);
    }
  }

 private:
  uint64_t state_;
};

}  // namespace astrai::testing
