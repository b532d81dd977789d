// Numbers and switches at the Python boundary, looked at only where the names of the operation and
// of the argument are known, so that a wrong one is refused by name.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>

namespace astrai::bindings {

namespace nb = nanobind;

template <class T>
class ScalarArg {
 public:
  ScalarArg() = default;
  explicit ScalarArg(nb::handle object) : object_(object) {}
  nb::handle object() const { return object_; }

 private:
  nb::handle object_;  // the caller's frame keeps it alive during the call
};

using IntArg = ScalarArg<int64_t>;
using FloatArg = ScalarArg<float>;
using FlagArg = ScalarArg<bool>;

// The value of an argument. Throws TypeError, "<op>: <name> is 1.5, a float; expected an int", for
// another kind of object (a bool is no number), std::invalid_argument for an int beyond 64 bits.
int64_t read(const char* op, const char* name, IntArg arg);
float read(const char* op, const char* name, FloatArg arg);
bool read(const char* op, const char* name, FlagArg arg);

template <class T>
std::optional<T> read(const char* op, const char* name, const std::optional<ScalarArg<T>>& arg) {
  if (!arg) return std::nullopt;
  return read(op, name, *arg);
}

}  // namespace astrai::bindings

namespace nanobind::detail {

template <class T>
struct type_caster<astrai::bindings::ScalarArg<T>> {
  NB_TYPE_CASTER(astrai::bindings::ScalarArg<T>, make_caster<T>::Name)

  bool from_python(handle source, uint8_t, cleanup_list*) noexcept {
    value = astrai::bindings::ScalarArg<T>(source);
    return true;
  }
};

}  // namespace nanobind::detail
