#include "bindings/scalar_arg.h"

#include "common/check.h"

namespace astrai::bindings {
namespace {

[[noreturn]] void refuse(const char* op, const char* name, nb::handle object, const char* rule) {
  throw nb::type_error(concat(op, ": ", name, " is ", nb::repr(object).c_str(), ", a ",
                              nb::type_name(object.type()).c_str(), "; expected ", rule)
                           .c_str());
}

}  // namespace

int64_t read(const char* op, const char* name, IntArg arg) {
  const nb::handle object = arg.object();
  if (PyBool_Check(object.ptr()) || !PyIndex_Check(object.ptr())) {
    refuse(op, name, object, "an int");
  }
  const nb::object number = nb::steal(PyNumber_Index(object.ptr()));
  if (!number.is_valid()) throw nb::python_error();
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  ASTRAI_CHECK_ARG(overflow == 0, op, ": ", name, " is ", nb::repr(number).c_str(),
                   "; expected an int of 64 bits");
  return value;
}

float read(const char* op, const char* name, FloatArg arg) {
  const nb::handle object = arg.object();
  if (PyFloat_CheckExact(object.ptr())) return static_cast<float>(PyFloat_AS_DOUBLE(object.ptr()));
  const bool is_number = PyIndex_Check(object.ptr()) || nb::hasattr(object, "__float__");
  if (PyBool_Check(object.ptr()) || !is_number) refuse(op, name, object, "a number");
  const double value = PyFloat_AsDouble(object.ptr());
  if (value == -1.0 && PyErr_Occurred() != nullptr) throw nb::python_error();
  return static_cast<float>(value);
}

bool read(const char* op, const char* name, FlagArg arg) {
  if (!PyBool_Check(arg.object().ptr())) refuse(op, name, arg.object(), "True or False");
  return arg.object().ptr() == Py_True;
}

}  // namespace astrai::bindings
