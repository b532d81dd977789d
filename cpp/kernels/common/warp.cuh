// Warp and cluster primitives that CUDA C++ offers only as PTX or in pieces.
#pragma once

#include <cstdint>

namespace astrai::kernels {

constexpr int kWarpSize = 32;
constexpr unsigned kFullWarp = 0xffffffffu;

// Reductions over aligned groups of `width` lanes (a power of two); every lane gets the result.
template <int width>
__device__ inline float group_max(float value) {
#pragma unroll
  for (int step = width / 2; step > 0; step /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, step));
  }
  return value;
}

template <int width>
__device__ inline float group_sum(float value) {
#pragma unroll
  for (int step = width / 2; step > 0; step /= 2) {
    value += __shfl_xor_sync(kFullWarp, value, step);
  }
  return value;
}

// ---- programmatic dependent launch
// ---------------------------------------------------------------- Before compute capability 9.0 a
// grid starts when its predecessor has ended, so both are no-ops.

// Waits until the grids that this one depends on have ended and their writes are visible. Every
// block of a kernel launched with the attribute must call it before it touches their data.
__device__ inline void wait_for_previous_grid() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next grid be launched while this one still runs.
__device__ inline void allow_next_grid() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- thread block clusters
// ------------------------------------------------------------------------ A cluster of one block
// before compute capability 9.0; hosts launch no larger one there.

__device__ inline int cluster_rank() {
#if __CUDA_ARCH__ >= 900
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
#else
  return 0;
#endif
}

// Orders shared memory of all blocks of the cluster: writes before it are visible after it.
__device__ inline void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
#else
  __syncthreads();
#endif
}

// Reads the float that block `rank` of the cluster holds at the place of `local` in its shared
// memory.
__device__ inline float load_cluster_shared(const float* local, int rank) {
#if __CUDA_ARCH__ >= 900
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(local));
  float value;
  asm volatile(
      "{\n\t.reg .b32 remote;\n\tmapa.shared::cluster.u32 remote, %1, %2;\n\t"
      "ld.shared::cluster.f32 %0, [remote];\n\t}"
      : "=f"(value)
      : "r"(address), "r"(rank)
      : "memory");
  return value;
#else
  return *local;
#endif
}

}  // namespace astrai::kernels
