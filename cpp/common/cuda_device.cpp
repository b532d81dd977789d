#include "common/cuda_device.h"

#include <array>
#include <cstdio>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

#include "common/check.h"
#include "common/counters.h"
#include "common/cuda_check.h"

#ifndef ASTRAI_CUDA_ARCHITECTURES
#error "the build must define ASTRAI_CUDA_ARCHITECTURES"
#endif

namespace astrai {
namespace {

constexpr int kMaxDevices = 64;

int device_attribute(cudaDeviceAttr attribute, int index) {
  int value = 0;
  ASTRAI_CHECK_CUDA(cudaDeviceGetAttribute(&value, attribute, index));
  return value;
}

[[noreturn]] void throw_no_code(const KernelConfig& kernel, int device, cudaError_t status) {
  cudaGetLastError();
  cudaDeviceProp properties{};
  ASTRAI_CHECK_CUDA(cudaGetDeviceProperties(&properties, device));
  throw std::runtime_error(concat(kernel.name, ": this build has no code for ", properties.name,
                                  " (compute capability ", properties.major, ".", properties.minor,
                                  "; ", cudaGetErrorName(status), "), only for architectures ",
                                  ASTRAI_CUDA_ARCHITECTURES,
                                  "; expected a build whose ASTRAI_CUDA_ARCHITECTURES includes ",
                                  properties.major, properties.minor));
}

void check_code(const KernelConfig& kernel, int device) {
  cudaFuncAttributes attributes{};
  const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel.function);
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction ||
      status == cudaErrorUnsupportedPtxVersion || status == cudaErrorInvalidKernelImage) {
    throw_no_code(kernel, device, status);
  }
  ASTRAI_CHECK_CUDA(status);
}

// A cluster stays inside one group of multiprocessors, and the groups differ in size, so how many
// fit at once is the device's own business. Sizes beyond 8 are asked for, never assumed.
std::array<int, kNumClusterSizes> active_clusters(const KernelConfig& kernel,
                                                  const CudaDevice& device) {
  std::array<int, kNumClusterSizes> result{};
  if (device.compute_major < 9) return result;
  ASTRAI_CHECK_CUDA(
      cudaFuncSetAttribute(kernel.function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  for (int i = 0; i < kNumClusterSizes; ++i) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = 1;
    attribute.val.clusterDim.y = 1u << i;
    attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(1, 1u << i);
    config.blockDim = dim3(static_cast<unsigned>(kernel.threads));
    config.dynamicSmemBytes = static_cast<size_t>(kernel.shared_bytes);
    config.attrs = &attribute;
    config.numAttrs = 1;
    int clusters = 0;
    if (cudaOccupancyMaxActiveClusters(&clusters, kernel.function, &config) == cudaSuccess) {
      result[static_cast<size_t>(i)] = clusters;
    } else {
      cudaGetLastError();  // the device has no clusters of this size
    }
  }
  return result;
}

KernelFacts make_kernel_facts(const KernelConfig& kernel, int device) {
  const CudaDevice& facts = cuda_device(device);
  check_code(kernel, device);
  ASTRAI_CHECK_STATE(kernel.shared_bytes <= facts.max_shared_bytes, kernel.name, ": needs ",
                     kernel.shared_bytes, " bytes of shared memory in a block; expected at most ",
                     facts.max_shared_bytes, ", what device ", device, " has");
  ASTRAI_CHECK_CUDA(cudaFuncSetAttribute(
      kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes));
  // One split of L1 and shared memory for all kernels: a change between two launches would make the
  // second wait until the first has left the multiprocessor.
  ASTRAI_CHECK_CUDA(cudaFuncSetAttribute(kernel.function,
                                         cudaFuncAttributePreferredSharedMemoryCarveout,
                                         cudaSharedmemCarveoutMaxShared));
  KernelFacts result;
  ASTRAI_CHECK_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
      &result.blocks_per_sm, kernel.function, kernel.threads,
      static_cast<size_t>(kernel.shared_bytes)));
  ASTRAI_CHECK_STATE(result.blocks_per_sm >= 1, kernel.name,
                     ": no block fits a multiprocessor of device ", device);
  result.active_clusters = active_clusters(kernel, facts);
  return result;
}

// A pool of our own: it keeps what is given back, so that a launch costs no trip to the driver, and
// the application's default pool keeps its settings.
cudaMemPool_t scratch_pool(int device) {
  static std::mutex mutex;
  static std::array<cudaMemPool_t, kMaxDevices> pools{};
  const std::lock_guard<std::mutex> lock(mutex);
  cudaMemPool_t& pool = pools.at(static_cast<size_t>(device));
  if (pool == nullptr) {
    cudaMemPoolProps properties{};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location.type = cudaMemLocationTypeDevice;
    properties.location.id = device;
    ASTRAI_CHECK_CUDA(cudaMemPoolCreate(&pool, &properties));
    uint64_t keep = std::numeric_limits<uint64_t>::max();
    ASTRAI_CHECK_CUDA(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep));
  }
  return pool;
}

}  // namespace

const CudaDevice& cuda_device(int index) {
  static std::mutex mutex;
  static std::array<CudaDevice, kMaxDevices> devices{};
  ASTRAI_CHECK_ARG(index >= 0 && index < kMaxDevices, "cuda_device: index ", index,
                   "; expected 0 to ", kMaxDevices - 1);
  const std::lock_guard<std::mutex> lock(mutex);
  CudaDevice& device = devices[static_cast<size_t>(index)];
  if (device.num_sms == 0) {
    device = {.compute_major = device_attribute(cudaDevAttrComputeCapabilityMajor, index),
              .compute_minor = device_attribute(cudaDevAttrComputeCapabilityMinor, index),
              .num_sms = device_attribute(cudaDevAttrMultiProcessorCount, index),
              .max_shared_bytes = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, index)};
  }
  return device;
}

CudaDeviceGuard::CudaDeviceGuard(int index) {
  int current = -1;
  ASTRAI_CHECK_CUDA(cudaGetDevice(&current));
  if (current == index) return;
  ASTRAI_CHECK_CUDA(cudaSetDevice(index));
  previous_ = current;
}

CudaDeviceGuard::~CudaDeviceGuard() {
  if (previous_ < 0) return;
  const cudaError_t status = cudaSetDevice(previous_);
  if (status != cudaSuccess) {
    std::fprintf(stderr, "astrai: cudaSetDevice(%d): %s\n", previous_, cudaGetErrorString(status));
  }
}

const KernelFacts& prepare_kernel(const KernelConfig& kernel, int device) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, KernelFacts> prepared;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto key = std::pair{kernel.function, device};
  const auto found = prepared.find(key);
  if (found != prepared.end()) return found->second;
  return prepared.emplace(key, make_kernel_facts(kernel, device)).first->second;
}

void launch_kernel(const KernelConfig& kernel, const KernelGrid& grid, const void* params,
                   int device, cudaStream_t stream) {
  prepare_kernel(kernel, device);
  cudaLaunchAttribute attributes[2];
  unsigned count_attributes = 0;
  if (cuda_device(device).compute_major >= 9) {
    attributes[count_attributes].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count_attributes++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (grid.cluster_y > 1) {
    attributes[count_attributes].id = cudaLaunchAttributeClusterDimension;
    attributes[count_attributes].val.clusterDim.x = 1;
    attributes[count_attributes].val.clusterDim.y = grid.cluster_y;
    attributes[count_attributes++].val.clusterDim.z = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid.x, grid.y);
  config.blockDim = dim3(static_cast<unsigned>(kernel.threads));
  config.dynamicSmemBytes = static_cast<size_t>(kernel.shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count_attributes;
  void* arguments[] = {const_cast<void*>(params)};
  const cudaError_t status = cudaLaunchKernelExC(&config, kernel.function, arguments);
  if (status != cudaSuccess) {
    detail::throw_cuda_error(
        concat("launch of ", kernel.name, " with ", grid.x, " x ", grid.y, " blocks").c_str(),
        status, __FILE__, __LINE__);
  }
  count(counters().launches);
}

StreamScratch::StreamScratch(int64_t bytes, int device, cudaStream_t stream) : stream_(stream) {
  if (bytes == 0) return;
  ASTRAI_CHECK_CUDA(
      cudaMallocFromPoolAsync(&data_, static_cast<size_t>(bytes), scratch_pool(device), stream));
  count(counters().device_allocations);
}

StreamScratch::~StreamScratch() {
  if (data_ == nullptr) return;
  const cudaError_t status = cudaFreeAsync(data_, stream_);
  if (status != cudaSuccess) {
    std::fprintf(stderr, "astrai: cudaFreeAsync: %s\n", cudaGetErrorString(status));
  }
}

}  // namespace astrai
