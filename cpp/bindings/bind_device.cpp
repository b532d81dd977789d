// Facts about the build, the devices and the process, and the switches that act on all kernels.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/module.h"
#include "common/counters.h"
#include "common/device.h"
#include "common/thread_pool.h"
#include "kernels/cpu/isa.h"

namespace astrai::bindings {

namespace nb = nanobind;

namespace {

nb::typed<nb::dict, nb::str, nb::int_> counters_dict() {
  const Counters& values = counters();
  nb::typed<nb::dict, nb::str, nb::int_> result;
  result["device_allocations"] = values.device_allocations.load();
  result["host_allocations"] = values.host_allocations.load();
  result["launches"] = values.launches.load();
  result["h2d_bytes"] = values.h2d_bytes.load();
  result["graph_replays"] = values.graph_replays.load();
  result["synchronizations"] = values.synchronizations.load();
  return result;
}

}  // namespace

void bind_device(nb::module_& module) {
  module.def("counters", &counters_dict,
             "Process-wide counts since the last reset_counters(): device_allocations, "
             "host_allocations, launches, h2d_bytes, graph_replays, synchronizations.");
  module.def("reset_counters", [] { counters().reset(); }, "Sets all counters to 0.");

  module.def("num_threads", &num_threads,
             "Threads that a CPU kernel may use, the caller included: ASTRAI_NUM_THREADS, else the "
             "CPUs that this process may run on. Raises ValueError when the variable is not a "
             "number from 1 to 1024.");
  module.def("set_num_threads", &set_num_threads, nb::arg("num_threads"),
             "Changes the number of threads of later kernels. Raises ValueError unless it is from "
             "1 to 1024.");

  module.def(
      "cpu_isa", [] { return std::string(kernels::cpu::cpu_kernels().isa); },
      "Instruction set that the CPU kernels run with: ASTRAI_CPU_ISA, else the best that "
      "this processor supports. Raises ValueError when the variable names one that is "
      "unknown, not compiled in, or not supported.");
  module.def("supported_isas", &kernels::cpu::supported_isas,
             "Instruction sets in this build that this processor can run, best first.");
  module.def("compiled_isas", &kernels::cpu::compiled_isas,
             "Instruction sets in this build, best first.");
  module.def("force_isa", &kernels::cpu::force_isa, nb::arg("name"),
             "Switches the CPU kernels to another instruction set, for tests and benchmarks; not "
             "while a kernel runs. Raises ValueError as cpu_isa().");

  module.def("built_with_cuda", &built_with_cuda, "Whether this build was configured with CUDA.");
  module.def("cuda_architectures", &cuda_architectures,
             "Architectures that this build has CUDA code for, such as '80' or '90a'; none without "
             "CUDA.");
  module.def("cuda_unavailable_reason", &cuda_unavailable_reason, nb::arg("index"),
             "Why no CUDA kernel of this build can run on device `index`; empty when they can. "
             "Creates no context.");
  module.def("cuda_device_count", &cuda_device_count,
             "CUDA devices that the driver reports; 0 without CUDA or without a driver.");
  nb::class_<CudaDeviceFacts>(module, "CudaDeviceFacts", "What the driver says about a device.")
      .def_ro("name", &CudaDeviceFacts::name)
      .def_ro("compute_major", &CudaDeviceFacts::compute_major)
      .def_ro("compute_minor", &CudaDeviceFacts::compute_minor)
      .def_ro("num_sms", &CudaDeviceFacts::num_sms)
      .def_ro("total_memory_bytes", &CudaDeviceFacts::total_memory_bytes);
  module.def("cuda_device_facts", &cuda_device_facts, nb::arg("index"),
             "Facts about one device. Raises ValueError for an index out of range, RuntimeError "
             "when the build has no CUDA.");
}

}  // namespace astrai::bindings
