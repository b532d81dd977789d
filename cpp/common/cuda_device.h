// Per-device facts, kernel preparation and stream-ordered scratch of the CUDA launchers. Nothing
// here waits for the device, and everything is safe inside a stream capture.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>

namespace astrai {

struct CudaDevice {
  int compute_major = 0;
  int compute_minor = 0;
  int num_sms = 0;
  int max_shared_bytes = 0;  // of one block, opted in
};

// Facts of a device, read once. Throws std::runtime_error when CUDA fails.
const CudaDevice& cuda_device(int index);

// Makes `index` the calling thread's device for its lifetime.
class CudaDeviceGuard {
 public:
  explicit CudaDeviceGuard(int index);
  ~CudaDeviceGuard();
  CudaDeviceGuard(const CudaDeviceGuard&) = delete;
  CudaDeviceGuard& operator=(const CudaDeviceGuard&) = delete;

 private:
  int previous_ = -1;  // -1: nothing to restore
};

struct KernelConfig {
  const void* function = nullptr;
  const char* name = nullptr;
  int threads = 0;
  int shared_bytes = 0;  // dynamic
};

constexpr int kNumClusterSizes = 5;  // 1 to 16 blocks

struct KernelFacts {
  int blocks_per_sm = 1;
  // Clusters of 2^i blocks that the device can run at once; 0 where it has none of that size.
  std::array<int, kNumClusterSizes> active_clusters{};
};

// Readies a kernel for launches on the current device, which must be `device`: checks that the
// build has code for it, raises its shared memory and cluster limits. Done at the first call for
// each kernel and device. Throws std::runtime_error; a build without the device's architecture is
// named as such.
const KernelFacts& prepare_kernel(const KernelConfig& kernel, int device);

struct KernelGrid {
  unsigned x = 1;
  unsigned y = 1;
  unsigned cluster_y = 1;  // blocks along y that form a cluster; divides y
};

// Queues a kernel whose one argument is the struct at `params`, and counts the launch. The kernel
// must call wait_for_previous_grid() before it touches memory: where the device allows it, its
// start overlaps the end of the one before. Prepares the kernel at its first launch. Throws
// std::runtime_error naming the kernel and the CUDA error.
void launch_kernel(const KernelConfig& kernel, const KernelGrid& grid, const void* params,
                   int device, cudaStream_t stream);

// Device memory that is taken and given back in stream order, uninitialised. Counted as a device
// allocation.
class StreamScratch {
 public:
  // bytes 0 takes nothing.
  StreamScratch(int64_t bytes, int device, cudaStream_t stream);
  ~StreamScratch();
  StreamScratch(const StreamScratch&) = delete;
  StreamScratch& operator=(const StreamScratch&) = delete;
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
  cudaStream_t stream_;
};

}  // namespace astrai
