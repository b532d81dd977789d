// Loads and stores of fewer elements than a vector has lanes, for the ends of rows. Tails go
// through the same vector arithmetic as whole vectors, so that an element's result does not depend
// on where in a row it stands.
#pragma once

#include <cstdint>

#include "kernels/cpu/vec.h"

namespace astrai::kernels::cpu::ASTRAI_ISA {

// Lanes from `count` on are zero; memory past `count` elements is not read.
template <class T>
inline VecF vload_partial(const T* p, int64_t count) {
  T buffer[VecF::kLanes] = {};
  for (int64_t i = 0; i < count; ++i) buffer[i] = p[i];
  return vload(buffer);
}

// Memory past `count` elements is not written.
template <class T>
inline void vstore_partial(T* p, VecF a, int64_t count) {
  T buffer[VecF::kLanes];
  vstore(buffer, a);
  for (int64_t i = 0; i < count; ++i) p[i] = buffer[i];
}

}  // namespace astrai::kernels::cpu::ASTRAI_ISA
