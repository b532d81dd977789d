// Chooses, once per process, the instruction set that the CPU kernels run with.
#pragma once

#include <string>
#include <vector>

#include "kernels/cpu/kernel_table.h"

namespace astrai::kernels::cpu {

// Names of the sets compiled into this build that this processor can run, best first.
std::vector<std::string> supported_isas();

// Names of all sets compiled into this build, best first.
std::vector<std::string> compiled_isas();

// The kernels in use. The first call decides: ASTRAI_CPU_ISA if set, else the best supported set.
// Throws std::invalid_argument when ASTRAI_CPU_ISA names a set that is unknown, not compiled, or
// not supported by this processor.
const CpuKernels& cpu_kernels();

// Switches to another set, for tests and benchmarks; the same errors as above. Not to be called
// while a kernel runs.
void force_isa(const std::string& name);

}  // namespace astrai::kernels::cpu
