// Argument and state checks. A bad argument throws std::invalid_argument (ValueError in Python), a
// broken invariant or a failed device call throws std::runtime_error (RuntimeError in Python).
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace astrai {

// Joins its arguments as an output stream would print them.
template <class... Args>
std::string concat(const Args&... args) {
  std::ostringstream stream;
  (stream << ... << args);
  return stream.str();
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
