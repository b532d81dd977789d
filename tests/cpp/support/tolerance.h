// How far a correctly rounded result may lie from the exact one, per dtype.
#pragma once

#include <cmath>

#include "common/dtype.h"

namespace astrai::testing {

// Half a unit in the last place of `exact`, which rounding to dtype alone may cost.
inline double rounding_error(DType dtype, double exact) {
  const double magnitude = std::abs(exact);
  switch (dtype) {
    case DType::kBFloat16:
      return std::fmax(magnitude * 0x1p-7, 0x1p-133) * 0.5;
    case DType::kFloat16:
      return std::fmax(magnitude * 0x1p-10, 0x1p-24) * 0.5;
    default:
      return std::fmax(magnitude * 0x1p-23, 0x1p-149) * 0.5;
  }
}

// The value as dtype holds it.
inline double rounded_to(DType dtype, double value) {
  double rounded = value;
  dispatch_float_dtype(
      dtype, [&]<class T>() { rounded = to_float(from_float<T>(static_cast<float>(value))); });
  return rounded;
}

inline constexpr DType kFloatTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

}  // namespace astrai::testing
