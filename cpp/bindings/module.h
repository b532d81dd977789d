// What each bind_<topic>.cpp adds to the module.
#pragma once

#include <nanobind/nanobind.h>

namespace astrai::bindings {

void bind_attention(nanobind::module_& module);
void bind_ops(nanobind::module_& module);
void bind_runtime(nanobind::module_& module);
void bind_device(nanobind::module_& module);

}  // namespace astrai::bindings
