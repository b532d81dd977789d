// Tensors at the Python boundary: anything that speaks DLPack becomes an astrai::TensorView for the
// time of one call. Nothing is copied, converted or synchronised.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <cstdint>
#include <optional>

#include "bindings/scalar_arg.h"
#include "common/tensor_view.h"

namespace astrai::bindings {

namespace nb = nanobind;

// An argument of a bound function, not looked at yet: borrowing needs the names of the operation
// and of the argument for its errors, and a type caster has neither.
class TensorArg {
 public:
  TensorArg() = default;
  explicit TensorArg(nb::handle object) : object_(object) {}
  nb::handle object() const { return object_; }

 private:
  nb::handle object_;  // the caller's frame keeps it alive during the call
};

// A view together with what keeps its memory and its bookkeeping alive. Destroy it with the GIL.
class BorrowedTensor {
 public:
  explicit BorrowedTensor(const TensorView& view, nb::ndarray<nb::ro> owner = {})
      : view_(view), owner_(std::move(owner)) {}
  const TensorView& view() const { return view_; }
  operator const TensorView&() const { return view_; }

 private:
  TensorView view_;
  nb::ndarray<nb::ro> owner_;  // empty where the argument itself owns everything
};

enum class Access { kRead, kWrite };

// A cudaStream_t as an int, or None.
using StreamArg = std::optional<IntArg>;

// Throws TypeError when the object is not a tensor; std::invalid_argument, "<op>: <name> ...", for
// an unsupported dtype, device or rank, for memory that is read-only where Access::kWrite is asked
// for, and for a tensor that requires grad while gradients are enabled (kernels have no backward).
BorrowedTensor borrow(const char* op, const char* name, const TensorArg& arg,
                      Access access = Access::kRead);

inline std::optional<BorrowedTensor> borrow(const char* op, const char* name,
                                            const std::optional<TensorArg>& arg,
                                            Access access = Access::kRead) {
  if (!arg) return std::nullopt;
  return borrow(op, name, *arg, access);
}

// The cudaStream_t for a kernel over `tensor`, which was borrowed from `arg`: the caller's, else
// the current one. The CPU has none.
void* stream_for(const char* op, const StreamArg& stream, const TensorArg& arg,
                 const BorrowedTensor& tensor);

inline const TensorView* view_or_null(const std::optional<BorrowedTensor>& tensor) {
  return tensor ? &tensor->view() : nullptr;
}

}  // namespace astrai::bindings

namespace nanobind::detail {

template <>
struct type_caster<astrai::bindings::TensorArg> {
  NB_TYPE_CASTER(astrai::bindings::TensorArg, const_name("object"))

  bool from_python(handle source, uint8_t, cleanup_list*) noexcept {
    value = astrai::bindings::TensorArg(source);
    return true;
  }
};

}  // namespace nanobind::detail
