// From a head dim known at run time to one known to the compiler.
#pragma once

#include <cstdint>

namespace astrai::kernels {

template <int64_t... Dims>
struct HeadDimList {};

// The only list of supported head dims: dispatch, error texts and tests all walk it.
using SupportedHeadDims = HeadDimList<32, 64, 80, 96, 128, 256>;

namespace detail {

template <class Fn, int64_t... Dims>
constexpr void for_each_head_dim(Fn&& fn, HeadDimList<Dims...>) {
  (fn(Dims), ...);
}

template <class Fn, int64_t... Dims>
bool dispatch_head_dim(int64_t head_dim, Fn&& fn, HeadDimList<Dims...>) {
  return ((head_dim == Dims ? (fn.template operator()<static_cast<int>(Dims)>(), true) : false) ||
          ...);
}

}  // namespace detail

// Calls fn(head_dim) for each supported head dim, in rising order.
template <class Fn>
constexpr void for_each_head_dim(Fn&& fn) {
  detail::for_each_head_dim(fn, SupportedHeadDims{});
}

// Calls fn.template operator()<int D>() with D == head_dim. Returns false, without a call, when the
// head dim is not supported.
template <class Fn>
bool dispatch_head_dim(int64_t head_dim, Fn&& fn) {
  return detail::dispatch_head_dim(head_dim, fn, SupportedHeadDims{});
}

}  // namespace astrai::kernels
