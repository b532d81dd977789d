# Enables the CUDA language for the toolkit that find_package(CUDAToolkit) found, and settles the
# architectures: ASTRAI_CUDA_ARCHITECTURES as far as this nvcc knows them.

execute_process(COMMAND "${CUDAToolkit_NVCC_EXECUTABLE}" --list-gpu-arch
                OUTPUT_VARIABLE _known_architectures OUTPUT_STRIP_TRAILING_WHITESPACE
                COMMAND_ERROR_IS_FATAL ANY)
set(ASTRAI_CUDA_ARCHITECTURES_BUILT "")
set(CMAKE_CUDA_ARCHITECTURES "")
foreach(architecture IN LISTS ASTRAI_CUDA_ARCHITECTURES)
  string(REGEX REPLACE "[af]$" "" number "${architecture}")
  if(NOT number MATCHES "^[0-9]+$")
    message(FATAL_ERROR "ASTRAI_CUDA_ARCHITECTURES: ${architecture}; expected numbers like 80 or 90a")
  elseif(number LESS 80)
    message(FATAL_ERROR "ASTRAI_CUDA_ARCHITECTURES: ${architecture}; expected 80 or later")
  elseif(_known_architectures MATCHES "compute_${number}(\n|$)")
    list(APPEND ASTRAI_CUDA_ARCHITECTURES_BUILT "${architecture}")
    list(APPEND CMAKE_CUDA_ARCHITECTURES "${architecture}-real")
  else()
    message(STATUS "astrai: nvcc ${CUDAToolkit_VERSION} does not know architecture ${architecture}")
  endif()
endforeach()
if(NOT ASTRAI_CUDA_ARCHITECTURES_BUILT)
  message(FATAL_ERROR "ASTRAI_CUDA_ARCHITECTURES: ${ASTRAI_CUDA_ARCHITECTURES}; expected at least "
                      "one that nvcc ${CUDAToolkit_VERSION} knows")
endif()

# As text: a list would be split at its semicolons where it becomes a macro.
list(JOIN ASTRAI_CUDA_ARCHITECTURES_BUILT ", " ASTRAI_CUDA_ARCHITECTURES_BUILT)

if(NOT CMAKE_CUDA_COMPILER)
  set(CMAKE_CUDA_COMPILER "${CUDAToolkit_NVCC_EXECUTABLE}" CACHE FILEPATH "CUDA compiler")
endif()
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake before 3.26 does not know nvcc's C++20
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()

option(ASTRAI_CUDA_LINEINFO "Keep source lines in CUDA code, for profilers" OFF)

# Adds CUDA sources to a target. They form an object library, so that their flags stay theirs.
function(astrai_cuda_sources target)
  add_library(${target}_cuda OBJECT ${ARGN})
  target_link_libraries(${target}_cuda PRIVATE astrai_common)
  target_compile_options(${target}_cuda PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>
    $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${ASTRAI_CUDA_LINEINFO}>>:-lineinfo>)
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:${target}_cuda>)
endfunction()
