// Running softmax (Milakov and Gimelshein 2018, arXiv:1805.02867).
//
// A state is (max, sum): the largest logit seen, and the sum of exp(logit - max). The empty state
// is
// (-inf, 0); values that belong to an empty state may be uninitialised and are never multiplied by
// its weight. A NaN logit makes the sum NaN and so reaches the result.
#pragma once

#include <cmath>

namespace astrai::kernels {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// 2 to the power of x in one instruction. What would be subnormal is zero.
__device__ inline float exp2_approx(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// exp(x) for x <= 0 in two instructions; the error grows with |x|, the result shrinks faster.
__device__ inline float exp_weight(float x) {
  return exp2_approx(x * kLog2e);
}

struct SoftmaxState {
  float max = -INFINITY;
  float sum = 0.0f;

  __device__ bool empty() const { return sum == 0.0f; }
};

// exp(from - to) for to >= from, and 0 for from = -inf even where `to` is -inf as well.
__device__ inline float rescale(float from, float to) {
  return from == -INFINITY ? 0.0f : exp_weight(from - to);
}

// The reference that exponents are taken against: never -inf, so that -inf - reference is -inf.
__device__ inline float finite_reference(float max) {
  return max == -INFINITY ? 0.0f : max;
}

// What the states of all parts of a row amount to.
struct SoftmaxTotal {
  float reference = 0.0f;
  float sum = 1.0f;
  float lse = -INFINITY;

  // `max` and `sum` over all parts; `sink` is a further logit with no value, -inf for none. An
  // empty row stays zeros with lse -inf, sink or not.
  __device__ SoftmaxTotal(float part_max, float part_sum, float sink) {
    if (part_sum == 0.0f) return;
    reference = fmaxf(part_max, sink);
    sum = part_sum;
    if (sink != -INFINITY) {
      sum = part_sum * expf(part_max - reference) + expf(sink - reference);
    }
    lse = reference + logf(sum);
  }

  // The share in the result of a part whose values are normalised by its own sum: exactly 1 when
  // the part is all there is, so that a row's bits do not depend on whether it took this detour.
  __device__ float share(float part_max, float part_sum) const {
    return part_sum * expf(part_max - reference) / sum;
  }
};

}  // namespace astrai::kernels
