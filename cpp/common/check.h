// Argument and state checks. A bad argument throws std::invalid_argument (ValueError in Python), a
// broken invariant or a failed device call throws std::runtime_error (RuntimeError in Python).
#pragma once

#include <charconv>
#include <concepts>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <string_view>

namespace astrai {
namespace detail {

template <class T>
void append_text(std::string& text, const T& value) {
  if constexpr (std::convertible_to<const T&, std::string_view>) {
    text += std::string_view(value);
  } else if constexpr (std::same_as<T, char>) {
    text += value;
  } else if constexpr (std::integral<T>) {
    char digits[24];
    text.append(digits, std::to_chars(digits, digits + sizeof(digits), +value).ptr);
  } else {
    static_assert(std::floating_point<T>, "text, a character or a number");
    char digits[32];
    std::snprintf(digits, sizeof(digits), "%g", static_cast<double>(value));
    text += digits;
  }
}

}  // namespace detail

// Joins texts, characters and numbers. Without a stream: the module shares a process with libraries
// that bring a C++ library of their own, and the locales behind streams do not survive every
// mixture.
template <class... Args>
std::string concat(const Args&... args) {
  std::string text;
  (detail::append_text(text, args), ...);
  return text;
}

}  // namespace astrai

// The message reads "<op>: <argument> <found>; expected <rule>". Its parts are evaluated only when
// the condition is false, so that a check costs one branch.
#define ASTRAI_CHECK_ARG(condition, ...)                          \
  do {                                                            \
    if (!(condition)) [[unlikely]] {                              \
      throw std::invalid_argument(::astrai::concat(__VA_ARGS__)); \
    }                                                             \
  } while (false)

#define ASTRAI_CHECK_STATE(condition, ...)                     \
  do {                                                         \
    if (!(condition)) [[unlikely]] {                           \
      throw std::runtime_error(::astrai::concat(__VA_ARGS__)); \
    }                                                          \
  } while (false)
