#include "bindings/module.h"

NB_MODULE(_ext, module) {
  module.doc() =
      "Compiled core of astrai: kernels, paged-cache runtime, device facts. Tensors are anything "
      "that speaks DLPack; use the wrappers in astrai.extension.ops.";
  module.attr("__version__") = ASTRAI_VERSION;
  astrai::bindings::bind_device(module);
  astrai::bindings::bind_ops(module);
  astrai::bindings::bind_attention(module);
  astrai::bindings::bind_runtime(module);
}
