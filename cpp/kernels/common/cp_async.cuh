// Asynchronous copies from global to shared memory (compute capability 8.0 and later).
#pragma once

#include <cstdint>

namespace astrai::kernels {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes. Passes through L2 only: the data is read once.
__device__ inline void cp_async_16(uint32_t destination, const void* source) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(destination), "l"(source)
               : "memory");
}

// Copies 16 bytes, or writes 16 zero bytes without reading `source` when `valid` is false.
__device__ inline void cp_async_16(uint32_t destination, const void* source, bool valid) {
  const int source_bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination),
               "l"(source), "r"(source_bytes)
               : "memory");
}

// Closes the group of copies issued since the last one; an empty group counts too.
__device__ inline void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `pending` of this thread's groups are still under way.
template <int pending>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

}  // namespace astrai::kernels
