#include "common/dtype.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace astrai {
namespace {

// The value of a 16-bit float, from the definition of the format.
double reference_value(uint32_t bits, int exponent_bits) {
  const int mantissa_bits = 15 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>((bits >> mantissa_bits) & ((1u << exponent_bits) - 1));
  const uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
  const double sign = (bits & 0x8000u) ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa ? std::numeric_limits<double>::quiet_NaN()
                    : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp((1u << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
}

template <class T>
struct Format;
template <>
struct Format<fp16> {
  static constexpr int kExponentBits = 5;
  static constexpr uint32_t kInfinity = 0x7c00;
};
template <>
struct Format<bf16> {
  static constexpr int kExponentBits = 8;
  static constexpr uint32_t kInfinity = 0x7f80;
};

template <class T>
T from_bits(uint32_t bits) {
  return T{static_cast<uint16_t>(bits)};
}

template <class T>
class SixteenBitFloat : public ::testing::Test {};
using SixteenBitTypes = ::testing::Types<fp16, bf16>;
TYPED_TEST_SUITE(SixteenBitFloat, SixteenBitTypes);

TYPED_TEST(SixteenBitFloat, EveryPatternHasItsValue) {
  for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const float value = to_float(from_bits<TypeParam>(bits));
    const double expected = reference_value(bits, Format<TypeParam>::kExponentBits);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(value)) << std::hex << bits;
    } else {
      ASSERT_EQ(static_cast<double>(value), expected) << std::hex << bits;
    }
    ASSERT_EQ(std::signbit(value), (bits & 0x8000u) != 0) << std::hex << bits;
  }
}

TYPED_TEST(SixteenBitFloat, EveryPatternSurvivesTheRoundTrip) {
  for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const uint32_t back = from_float<TypeParam>(to_float(from_bits<TypeParam>(bits))).bits;
    if ((bits & 0x7fffu) > Format<TypeParam>::kInfinity) {
      ASSERT_GT(back & 0x7fffu, Format<TypeParam>::kInfinity) << std::hex << bits;
      ASSERT_EQ(back & 0x8000u, bits & 0x8000u) << std::hex << bits;
    } else {
      ASSERT_EQ(back, bits);
    }
  }
}

// All rounding decisions there are: at, just below and just above the middle of every pair of
// neighbours, and at the neighbours' own neighbours in float. The last pair is the largest finite
// number and infinity, which rounds as if one more number followed.
TYPED_TEST(SixteenBitFloat, RoundsToNearestTiesToEvenBetweenAllNeighbours) {
  constexpr int kExponentBits = Format<TypeParam>::kExponentBits;
  constexpr uint32_t kInfinity = Format<TypeParam>::kInfinity;
  for (uint32_t low = 0; low < kInfinity; ++low) {
    const uint32_t high = low + 1;
    const double low_value = reference_value(low, kExponentBits);
    const double high_value =
        high == kInfinity ? low_value + (low_value - reference_value(low - 1, kExponentBits))
                          : reference_value(high, kExponentBits);
    const double middle_value = (low_value + high_value) / 2;
    const auto middle = static_cast<float>(middle_value);
    ASSERT_EQ(static_cast<double>(middle), middle_value) << "the middle is a float";
    const float infinity = std::numeric_limits<float>::infinity();
    const float below = std::nextafter(middle, 0.0f);
    const float above = std::nextafter(middle, infinity);
    const uint32_t even = low % 2 == 0 ? low : high;
    const struct {
      float value;
      uint32_t expected;
    } cases[] = {{middle, even},
                 {below, low},
                 {above, high},
                 {std::nextafter(static_cast<float>(low_value), infinity), low}};
    for (const auto& c : cases) {
      // Where a bfloat16 has no float between it and the middle the last case is the middle.
      const uint32_t expected = c.value == middle ? even : c.expected;
      ASSERT_EQ(from_float<TypeParam>(c.value).bits, expected) << std::hexfloat << c.value;
      ASSERT_EQ(from_float<TypeParam>(-c.value).bits, expected | 0x8000u)
          << std::hexfloat << -c.value;
    }
  }
}

TYPED_TEST(SixteenBitFloat, InfinityZeroAndFloatLimits) {
  constexpr uint32_t kInfinity = Format<TypeParam>::kInfinity;
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(from_float<TypeParam>(infinity).bits, kInfinity);
  EXPECT_EQ(from_float<TypeParam>(-infinity).bits, kInfinity | 0x8000u);
  EXPECT_EQ(from_float<TypeParam>(std::numeric_limits<float>::max()).bits, kInfinity);
  EXPECT_EQ(from_float<TypeParam>(0.0f).bits, 0u);
  EXPECT_EQ(from_float<TypeParam>(-0.0f).bits, 0x8000u);
  EXPECT_EQ(from_float<TypeParam>(std::numeric_limits<float>::denorm_min()).bits, 0u);
}

TYPED_TEST(SixteenBitFloat, NanStaysAQuietNan) {
  constexpr uint32_t kInfinity = Format<TypeParam>::kInfinity;
  // The first mantissa bit, just below the exponent.
  constexpr uint32_t kQuietBit = 1u << (14 - Format<TypeParam>::kExponentBits);
  // The payload may lie wholly in the bits that a 16-bit float drops.
  for (uint32_t payload : {0x1u, 0xfffu, 0x1fffu, 0xffffu, 0x200000u, 0x400000u, 0x7fffffu}) {
    for (uint32_t sign : {0u, 0x80000000u}) {
      const float nan = std::bit_cast<float>(sign | 0x7f800000u | payload);
      const uint32_t bits = from_float<TypeParam>(nan).bits;
      EXPECT_GT(bits & 0x7fffu, kInfinity) << std::hex << payload;
      EXPECT_TRUE(std::isnan(to_float(from_bits<TypeParam>(bits))));
      EXPECT_NE(bits & kQuietBit, 0u) << std::hex << payload;
      EXPECT_EQ(bits >> 15, sign >> 31);
    }
  }
}

TEST(Float16, KnownValues) {
  EXPECT_EQ(from_float<fp16>(1.0f).bits, 0x3c00);
  EXPECT_EQ(from_float<fp16>(-2.0f).bits, 0xc000);
  EXPECT_EQ(from_float<fp16>(65504.0f).bits, 0x7bff);
  EXPECT_EQ(from_float<fp16>(65519.99f).bits, 0x7bff);
  EXPECT_EQ(from_float<fp16>(65520.0f).bits, 0x7c00);
  EXPECT_EQ(from_float<fp16>(0x1p-24f).bits, 0x0001);
  EXPECT_EQ(from_float<fp16>(0x1p-25f).bits, 0x0000);
  EXPECT_EQ(from_float<fp16>(0x1.8p-25f).bits, 0x0001);
  EXPECT_EQ(from_float<fp16>(0.1f).bits, 0x2e66);
}

TEST(BFloat16, KnownValues) {
  EXPECT_EQ(from_float<bf16>(1.0f).bits, 0x3f80);
  EXPECT_EQ(from_float<bf16>(-2.0f).bits, 0xc000);
  EXPECT_EQ(from_float<bf16>(3.14159265f).bits, 0x4049);
  EXPECT_EQ(from_float<bf16>(std::bit_cast<float>(0x3f808000u)).bits, 0x3f80);
  EXPECT_EQ(from_float<bf16>(std::bit_cast<float>(0x3f818000u)).bits, 0x3f82);
}

TEST(DTypeTable, SizesAndNames) {
  const struct {
    DType dtype;
    int64_t bytes;
    const char* name;
    bool floating;
  } rows[] = {
      {DType::kFloat32, 4, "float32", true},   {DType::kFloat16, 2, "float16", true},
      {DType::kBFloat16, 2, "bfloat16", true}, {DType::kInt32, 4, "int32", false},
      {DType::kInt64, 8, "int64", false},      {DType::kUInt8, 1, "uint8", false},
      {DType::kBool, 1, "bool", false},
  };
  for (const auto& row : rows) {
    EXPECT_EQ(dtype_bytes(row.dtype), row.bytes) << row.name;
    EXPECT_EQ(dtype_name(row.dtype), row.name);
    EXPECT_EQ(is_floating(row.dtype), row.floating) << row.name;
  }
}

TEST(DispatchFloatDtype, CallsWithTheTypeAndRefusesTheRest) {
  for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    DType called_with = DType::kBool;
    EXPECT_TRUE(dispatch_float_dtype(dtype, [&]<class T>() { called_with = dtype_of<T>::value; }));
    EXPECT_EQ(called_with, dtype);
  }
  for (DType dtype : {DType::kInt32, DType::kInt64, DType::kUInt8, DType::kBool}) {
    EXPECT_FALSE(dispatch_float_dtype(dtype, []<class T>() { FAIL() << "must not be called"; }));
  }
}

static_assert(from_float<fp16>(1.5f).bits == 0x3e00, "conversions are usable at compile time");
static_assert(to_float(bf16{0x3fc0}) == 1.5f);

}  // namespace
}  // namespace astrai
