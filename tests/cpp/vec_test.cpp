#include "kernels/cpu/vec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "common/dtype.h"
#include "kernels/cpu/isa.h"
#include "support/test_random.h"
#include "support/vec_probe.h"

namespace astrai {
namespace {

using testing::VecProbe;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// The probes of the sets that this processor runs.
std::vector<const VecProbe*> probes() {
  std::vector<const VecProbe*> all = {&testing::vec_probe_baseline()};
#if ASTRAI_HAVE_AVX2
  all.push_back(&testing::vec_probe_avx2());
#endif
#if ASTRAI_HAVE_AVX512
  all.push_back(&testing::vec_probe_avx512());
#endif
  std::vector<const VecProbe*> supported;
  for (const VecProbe* probe : all) {
    for (const std::string& isa : kernels::cpu::supported_isas()) {
      if (isa == probe->isa) supported.push_back(probe);
    }
  }
  return supported;
}

uint32_t bits_of(float value) {
  return std::bit_cast<uint32_t>(value);
}

// Distance in units of the last place of the correctly rounded result.
double ulps(float value, double exact) {
  const float rounded = static_cast<float>(exact);
  const double ulp = std::nextafter(rounded, kInfinity) - static_cast<double>(rounded);
  return std::abs(static_cast<double>(value) - exact) / ulp;
}

// Every set rounds alike, so one array serves all: a multiple of any number of lanes.
std::vector<float> padded(std::vector<float> values) {
  while (values.size() % 16 != 0) values.push_back(0.0f);
  return values;
}

std::vector<float> tricky_floats() {
  std::vector<float> values = {0.0f,          -0.0f,         1.0f,      -1.0f,     kInfinity,
                               -kInfinity,    kNan,          -kNan,     65504.f,   65519.96f,
                               65520.0f,      -65520.0f,     0x1p-24f,  0x1p-25f,  0x1.8p-25f,
                               0x1p-14f,      0x1.ffcp-15f,  0x1p-126f, 0x1p-133f, 0x1p-149f,
                               3.4028235e38f, -3.4028235e38f};
  testing::Random random(testing::test_seed());
  for (int i = 0; i < 200000; ++i) {
    values.push_back(std::bit_cast<float>(static_cast<uint32_t>(random.bits())));
  }
  // Ties between two 16-bit neighbours, and their neighbours.
  for (uint32_t high = 0; high < 0x10000u; high += 7) {
    for (uint32_t low : {0x7fffu, 0x8000u, 0x8001u}) {
      values.push_back(std::bit_cast<float>((high << 16) | low));
    }
  }
  for (uint32_t high = 0x30000000u; high < 0x48000000u; high += 0x2000u * 5) {
    for (uint32_t low : {0xfffu, 0x1000u, 0x1001u}) {
      values.push_back(std::bit_cast<float>(high | low));
    }
  }
  return padded(values);
}

TEST(Vec, ExpIsWithinTwoUlps) {
  std::vector<float> inputs;
  for (float x = -87.3f; x <= 88.3f; x += 0.0007f) inputs.push_back(x);
  for (float x = -1.0f; x <= 1.0f; x += 0.00003f) inputs.push_back(x);
  inputs = padded(inputs);
  std::vector<float> outputs(inputs.size());
  for (const VecProbe* probe : probes()) {
    probe->exp(inputs.data(), outputs.data(), static_cast<int64_t>(inputs.size()));
    for (size_t i = 0; i < inputs.size(); ++i) {
      ASSERT_LE(ulps(outputs[i], std::exp(static_cast<double>(inputs[i]))), 2.0)
          << probe->isa << " exp(" << inputs[i] << ") = " << outputs[i];
    }
  }
}

TEST(Vec, ExpAtTheEnds) {
  const std::vector<float> inputs =
      padded({-kInfinity, -3.4e38f, -1000.0f, -87.4f, kInfinity, 1000.0f, kNan, 0.0f});
  std::vector<float> outputs(inputs.size());
  for (const VecProbe* probe : probes()) {
    probe->exp(inputs.data(), outputs.data(), static_cast<int64_t>(inputs.size()));
    for (int i = 0; i < 4; ++i) EXPECT_EQ(bits_of(outputs[i]), 0u) << probe->isa << inputs[i];
    // Clamped: as large as exp(88.3), and finite.
    for (int i = 4; i < 6; ++i)
      EXPECT_LE(ulps(outputs[i], std::exp(double{88.3f})), 2.0) << probe->isa;
    EXPECT_TRUE(std::isnan(outputs[6])) << probe->isa;
    EXPECT_EQ(outputs[7], 1.0f) << probe->isa;
  }
}

template <class T, class Widen>
void expect_widens_every_pattern(const VecProbe* probe, Widen widen) {
  std::vector<T> inputs;
  for (uint32_t bits = 0; bits < 0x10000u; ++bits) inputs.push_back({static_cast<uint16_t>(bits)});
  std::vector<float> outputs(inputs.size());
  widen(inputs.data(), outputs.data(), static_cast<int64_t>(inputs.size()));
  for (size_t i = 0; i < inputs.size(); ++i) {
    const float expected = to_float(inputs[i]);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(outputs[i])) << probe->isa << " pattern " << i;
    } else {
      ASSERT_EQ(bits_of(outputs[i]), bits_of(expected)) << probe->isa << " pattern " << i;
    }
  }
}

TEST(Vec, WidensEveryPatternLikeTheScalarConversion) {
  for (const VecProbe* probe : probes()) {
    expect_widens_every_pattern<bf16>(probe, probe->widen_bf16);
    expect_widens_every_pattern<fp16>(probe, probe->widen_fp16);
  }
}

template <class T, class Narrow>
void expect_narrows_alike(const VecProbe* probe, Narrow narrow, const std::vector<float>& inputs) {
  std::vector<T> outputs(inputs.size());
  narrow(inputs.data(), outputs.data(), static_cast<int64_t>(inputs.size()));
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (std::isnan(inputs[i])) {
      ASSERT_TRUE(std::isnan(to_float(outputs[i])))
          << probe->isa << " " << std::hex << bits_of(inputs[i]);
    } else {
      ASSERT_EQ(outputs[i].bits, from_float<T>(inputs[i]).bits)
          << probe->isa << " " << std::hex << bits_of(inputs[i]);
    }
  }
}

TEST(Vec, NarrowsLikeTheScalarConversion) {
  const std::vector<float> inputs = tricky_floats();
  for (const VecProbe* probe : probes()) {
    expect_narrows_alike<bf16>(probe, probe->narrow_bf16, inputs);
    expect_narrows_alike<fp16>(probe, probe->narrow_fp16, inputs);
  }
}

TEST(Vec, RoundsToNearestEven) {
  const std::vector<float> inputs =
      padded({0.5f, 1.5f, 2.5f, -0.5f, -1.5f, 0.49999997f, 126.5f, -125.7f, 3.0f, 1e6f, -1e6f});
  std::vector<float> outputs(inputs.size());
  for (const VecProbe* probe : probes()) {
    probe->round(inputs.data(), outputs.data(), static_cast<int64_t>(inputs.size()));
    for (size_t i = 0; i < inputs.size(); ++i) {
      EXPECT_EQ(outputs[i], std::nearbyint(inputs[i])) << probe->isa << " " << inputs[i];
    }
  }
}

TEST(Vec, ScalesByPowersOfTwo) {
  std::vector<float> inputs;
  std::vector<float> exponents;
  for (int n = -126; n <= 127; ++n) {
    inputs.push_back(n % 2 ? 1.25f : -0.75f);
    exponents.push_back(static_cast<float>(n));
  }
  inputs = padded(inputs);
  exponents = padded(exponents);
  std::vector<float> outputs(inputs.size());
  for (const VecProbe* probe : probes()) {
    probe->scale_by_pow2(inputs.data(), exponents.data(), outputs.data(),
                         static_cast<int64_t>(inputs.size()));
    for (size_t i = 0; i < inputs.size(); ++i) {
      EXPECT_EQ(outputs[i], std::ldexp(inputs[i], static_cast<int>(exponents[i]))) << probe->isa;
    }
  }
}

TEST(Vec, ComparesLaneByLane) {
  const std::vector<float> a = padded({1.0f, 2.0f, -kInfinity, 0.0f, kNan, 1.0f, 3.0f});
  const std::vector<float> b = padded({2.0f, 1.0f, 5.0f, 0.0f, 1.0f, kNan, kInfinity});
  std::vector<float> top(a.size());
  std::vector<float> low(a.size());
  std::vector<float> less(a.size());
  for (const VecProbe* probe : probes()) {
    const auto count = static_cast<int64_t>(a.size());
    probe->max(a.data(), b.data(), top.data(), count);
    probe->min(a.data(), b.data(), low.data(), count);
    probe->select_lt(a.data(), b.data(), less.data(), count);
    for (size_t i = 0; i < a.size(); ++i) {
      EXPECT_EQ(less[i], a[i] < b[i] ? 1.0f : 2.0f) << probe->isa << " lane " << i;
      // With a NaN on either side the second operand is the answer, on every set.
      const bool unordered = std::isnan(a[i]) || std::isnan(b[i]);
      const float expected_top = unordered ? b[i] : std::max(a[i], b[i]);
      const float expected_low = unordered ? b[i] : std::min(a[i], b[i]);
      EXPECT_TRUE(top[i] == expected_top || (std::isnan(top[i]) && std::isnan(expected_top)))
          << probe->isa << " lane " << i;
      EXPECT_TRUE(low[i] == expected_low || (std::isnan(low[i]) && std::isnan(expected_low)))
          << probe->isa << " lane " << i;
    }
  }
}

TEST(Vec, ReducesAllLanes) {
  for (const VecProbe* probe : probes()) {
    for (int place = 0; place < probe->lanes; ++place) {
      std::vector<float> values(static_cast<size_t>(probe->lanes), -2.0f);
      values[static_cast<size_t>(place)] = 100.0f;
      EXPECT_EQ(probe->reduce_max(values.data()), 100.0f) << probe->isa << " lane " << place;
      EXPECT_EQ(probe->reduce_add(values.data()), 100.0f - 2.0f * (probe->lanes - 1))
          << probe->isa << " lane " << place;
    }
  }
}

template <class T, class Copy>
void expect_copies_only(const VecProbe* probe, Copy copy) {
  for (int count = 1; count <= probe->lanes; ++count) {
    // Exactly as long as may be read, so that AddressSanitizer sees any stray read.
    const std::vector<T> in(static_cast<size_t>(count), from_float<T>(3.0f));
    std::vector<T> out(static_cast<size_t>(probe->lanes) + 1, from_float<T>(-1.0f));
    copy(in.data(), out.data(), count);
    for (int i = 0; i <= probe->lanes; ++i) {
      EXPECT_EQ(to_float(out[static_cast<size_t>(i)]), i < count ? 3.0f : -1.0f)
          << probe->isa << " count " << count << " element " << i;
    }
  }
}

TEST(Vec, PartialLoadsAndStoresStayInside) {
  for (const VecProbe* probe : probes()) {
    expect_copies_only<float>(probe, probe->copy_partial_fp32);
    expect_copies_only<bf16>(probe, probe->copy_partial_bf16);
  }
}

}  // namespace
}  // namespace astrai
