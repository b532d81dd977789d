// Argument checks that the host entry points of all kernels share. Each throws
// std::invalid_argument "<op>: <argument> <found>; expected <rule>".
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string_view>

#include "common/tensor_view.h"

namespace astrai::kernels {

// A tensor argument and the name that its caller knows it by.
struct NamedTensor {
  std::string_view name;
  const TensorView& view;
};

void check_rank(const char* op, NamedTensor tensor, int ndim);

// `reason` completes the sentence, for instance "as x".
void check_dtype(const char* op, NamedTensor tensor, DType expected, std::string_view reason = "");
void check_floating(const char* op, NamedTensor tensor);
void check_extent(const char* op, NamedTensor tensor, int dim, int64_t expected,
                  std::string_view rule);
void check_same_device(const char* op, NamedTensor first, std::initializer_list<NamedTensor> rest);

// The last dimension has stride 1; one of extent 0 or 1 may have any.
void check_unit_last_stride(const char* op, NamedTensor tensor);

// No two elements of a tensor that is written share an address.
void check_writable(const char* op, NamedTensor tensor);

// The two share no address. Views that interleave inside one buffer (slices of a fused projection,
// K and V halves of a page) pass when their strides agree from the outermost dimension inwards;
// where they do not, overlapping address ranges are refused.
void check_disjoint(const char* op, NamedTensor written, NamedTensor other);

// Same as check_disjoint, but `other` may also be the very same view as `written`.
void check_disjoint_or_same(const char* op, NamedTensor written, NamedTensor other);

}  // namespace astrai::kernels
