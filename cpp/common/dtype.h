// Element types and the two 16-bit floats, with conversions that need no hardware support.
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

namespace astrai {

// No kernel computes in float64; it is known so that an operation can say what it takes instead.
enum class DType : uint8_t {
  kFloat32,
  kFloat16,
  kBFloat16,
  kFloat64,
  kInt32,
  kInt64,
  kUInt8,
  kBool
};

constexpr int64_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
    case DType::kUInt8:
    case DType::kBool:
      return 1;
  }
  return 0;
}

constexpr std::string_view dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat64:
      return "float64";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kUInt8:
      return "uint8";
    case DType::kBool:
      return "bool";
  }
  return "unknown";
}

constexpr bool is_floating(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

struct bf16 {
  uint16_t bits;
};

struct fp16 {
  uint16_t bits;
};

constexpr float to_float(float value) {
  return value;
}

constexpr float to_float(bf16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

constexpr float to_float(fp16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t exponent = (value.bits >> 10) & 0x1fu;
  const uint32_t mantissa = value.bits & 0x3ffu;
  if (exponent == 0x1f) {  // infinity or NaN
    return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  }
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24 is exact in float
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

// Round to nearest, ties to even; a NaN stays a (quiet) NaN.
template <class T>
constexpr T from_float(float value);

template <>
constexpr float from_float<float>(float value) {
  return value;
}

template <>
constexpr bf16 from_float<bf16>(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return bf16{static_cast<uint16_t>((bits >> 16) | 0x0040u)};
  }
  return bf16{static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

template <>
constexpr fp16 from_float<fp16>(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return fp16{static_cast<uint16_t>(sign | 0x7e00u)};
  }
  if (magnitude >= 0x477ff000u) {  // rounds to 65536 or more: infinity
    return fp16{static_cast<uint16_t>(sign | 0x7c00u)};
  }
  if (magnitude < 0x38800000u) {  // below 2^-14: subnormal or zero
    // Adding 0.5 puts the subnormal's last bit (2^-24) at the last bit of the sum, so the
    // hardware's own rounding does the work.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return fp16{static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u))};
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return fp16{static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
}

template <class T>
struct dtype_of;
template <>
struct dtype_of<float> {
  static constexpr DType value = DType::kFloat32;
};
template <>
struct dtype_of<fp16> {
  static constexpr DType value = DType::kFloat16;
};
template <>
struct dtype_of<bf16> {
  static constexpr DType value = DType::kBFloat16;
};

// Calls fn.template operator()<T>() with T = float, fp16 or bf16. Returns false, without a call,
// for any other dtype, so that the caller can word the error.
template <class Fn>
bool dispatch_float_dtype(DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::kFloat32:
      fn.template operator()<float>();
      return true;
    case DType::kFloat16:
      fn.template operator()<fp16>();
      return true;
    case DType::kBFloat16:
      fn.template operator()<bf16>();
      return true;
    default:
      return false;
  }
}

}  // namespace astrai
