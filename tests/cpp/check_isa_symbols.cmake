# Fails when an object built for one instruction set defines a symbol that the linker could merge
# with, or take for, that of another set: everything must lie in the set's own namespace.
#
#   cmake -DNM=<nm> -DISA=<name> -DOBJECTS=<a.o,b.o,...> -P check_isa_symbols.cmake
string(REPLACE "," ";" OBJECTS "${OBJECTS}")
set(strays "")
foreach(object IN LISTS OBJECTS)
  execute_process(COMMAND "${NM}" -C --defined-only --extern-only "${object}"
                  OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REPLACE ";" "," symbols "${symbols}")
  string(REPLACE "\n" ";" symbols "${symbols}")
  foreach(symbol IN LISTS symbols)
    if(symbol STREQUAL "" OR symbol MATCHES "cpu::${ISA}::|kernels_${ISA}\\(\\)$")
      continue()
    endif()
    string(APPEND strays "  ${object}: ${symbol}\n")
  endforeach()
endforeach()
if(strays)
  message(FATAL_ERROR "symbols outside namespace cpu::${ISA}:\n${strays}")
endif()
