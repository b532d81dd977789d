// A tensor in memory of its own, on any device, whose every byte outside the tensor's elements is
// poisoned: reads that stray turn results into NaN, writes that stray are found.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

#include "common/dtype.h"
#include "common/tensor_view.h"

#if ASTRAI_WITH_CUDA
#include "common/cuda_check.h"
#endif

namespace astrai::testing {

// Exactly `bytes` bytes of device memory. On the CPU a heap block of that size, so that
// AddressSanitizer sees every access past its end; on CUDA an allocation of its own, for
// compute-sanitizer.
class DeviceBuffer {
 public:
  DeviceBuffer(Device device, size_t bytes) : device_(device), bytes_(bytes) {
    const size_t at_least_one = bytes == 0 ? 1 : bytes;
    if (device.type == DeviceType::kCpu) {
      memory_ = new uint8_t[at_least_one];
    } else {
      cuda_allocate(at_least_one);
    }
  }
  ~DeviceBuffer();
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  void* data() const { return memory_; }
  void upload(const void* host) { copy(memory_, host); }
  // Waits for the device.
  void download(void* host) const { copy(host, memory_); }

 private:
  void cuda_allocate(size_t bytes);
  void copy(void* to, const void* from) const;

  Device device_;
  size_t bytes_;
  uint8_t* memory_ = nullptr;
};

#if ASTRAI_WITH_CUDA

inline void DeviceBuffer::cuda_allocate(size_t bytes) {
  ASTRAI_CHECK_CUDA(cudaMalloc(reinterpret_cast<void**>(&memory_), bytes));
}

inline DeviceBuffer::~DeviceBuffer() {
  if (device_.type == DeviceType::kCpu) {
    delete[] memory_;
  } else {
    cudaFree(memory_);
  }
}

inline void DeviceBuffer::copy(void* to, const void* from) const {
  if (bytes_ == 0) return;
  if (device_.type == DeviceType::kCpu) {
    std::memcpy(to, from, bytes_);
  } else {
    ASTRAI_CHECK_CUDA(cudaMemcpy(to, from, bytes_, cudaMemcpyDefault));
  }
}

#else

inline void DeviceBuffer::cuda_allocate(size_t) {
  throw std::runtime_error("DeviceBuffer: this build has no CUDA");
}

inline DeviceBuffer::~DeviceBuffer() {
  delete[] memory_;
}

inline void DeviceBuffer::copy(void* to, const void* from) const {
  std::memcpy(to, from, bytes_);
}

#endif

enum class Poison { kNan, kInf, kZero };

// Floats: as named. Other types: bytes that make no sense as an index (negative and huge).
inline double poison_value(Poison poison) {
  switch (poison) {
    case Poison::kNan:
      return __builtin_nan("");
    case Poison::kInf:
      return __builtin_inf();
    case Poison::kZero:
      break;
  }
  return 0.0;
}

class TestTensor {
 public:
  static constexpr int64_t kGuard = 64;  // poisoned elements before and after

  TestTensor() = default;

  // `strides` in elements, none negative. Every element, inside and outside, starts poisoned.
  TestTensor(Device device, DType dtype, std::vector<int64_t> shape, std::vector<int64_t> strides,
             Poison poison)
      : device_(device), dtype_(dtype), shape_(std::move(shape)), strides_(std::move(strides)) {
    int64_t extent = 1;
    bool empty = false;
    for (size_t i = 0; i < shape_.size(); ++i) {
      empty |= shape_[i] == 0;
      extent += (shape_[i] - 1) * strides_[i];
    }
    num_elements_ = (empty ? 0 : extent) + 2 * kGuard;
    image_.resize(static_cast<size_t>(num_elements_ * dtype_bytes(dtype_)));
    for (int64_t i = 0; i < num_elements_; ++i) store(i, poison_value(poison));
    original_ = image_;
  }

  // Contiguous.
  TestTensor(Device device, DType dtype, std::vector<int64_t> shape, Poison poison)
      : TestTensor(device, dtype, shape, contiguous_strides(shape), poison) {}

  static std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& shape) {
    std::vector<int64_t> strides(shape.size());
    int64_t stride = 1;
    for (size_t i = shape.size(); i-- > 0;) {
      strides[i] = stride;
      stride *= shape[i];
    }
    return strides;
  }

  void set(std::initializer_list<int64_t> index, double value) { store(position(index), value); }
  double get(std::initializer_list<int64_t> index) const { return load(position(index)); }

  // Copies the host image to the device and describes it. The tensor must outlive the view.
  TensorView upload() {
    original_ = image_;
    buffer_ = std::make_shared<DeviceBuffer>(device_, image_.size());
    buffer_->upload(image_.data());
    TensorView view;
    view.data = static_cast<uint8_t*>(buffer_->data()) + kGuard * dtype_bytes(dtype_);
    view.dtype = dtype_;
    view.device = device_;
    view.ndim = static_cast<int>(shape_.size());
    for (size_t i = 0; i < shape_.size(); ++i) {
      view.shape[i] = shape_[i];
      view.strides[i] = strides_[i];
    }
    return view;
  }

  void download() { buffer_->download(image_.data()); }

  // After a download: the bytes of the elements, row after row.
  std::vector<uint8_t> element_bytes() const {
    std::vector<uint8_t> bytes;
    const int64_t size = dtype_bytes(dtype_);
    for_each_position([&](int64_t at) {
      bytes.insert(bytes.end(), image_.begin() + at * size, image_.begin() + (at + 1) * size);
    });
    return bytes;
  }

  // After a download: true when every byte outside the elements is as it was uploaded.
  bool surroundings_intact() const {
    std::vector<bool> inside(static_cast<size_t>(num_elements_), false);
    for_each_position([&](int64_t at) { inside[static_cast<size_t>(at)] = true; });
    const int64_t size = dtype_bytes(dtype_);
    for (int64_t i = 0; i < num_elements_; ++i) {
      if (inside[static_cast<size_t>(i)]) continue;
      if (std::memcmp(&image_[static_cast<size_t>(i * size)],
                      &original_[static_cast<size_t>(i * size)], static_cast<size_t>(size)) != 0) {
        return false;
      }
    }
    return true;
  }

 private:
  int64_t position(std::initializer_list<int64_t> index) const {
    int64_t at = kGuard;
    size_t i = 0;
    for (int64_t value : index) at += value * strides_[i++];
    return at;
  }

  template <class Fn>
  void for_each_position(Fn&& fn) const {
    int64_t count = 1;
    for (int64_t extent : shape_) count *= extent;
    for (int64_t flat = 0; flat < count; ++flat) {
      int64_t at = kGuard;
      int64_t rest = flat;
      for (size_t i = shape_.size(); i-- > 0;) {
        at += rest % shape_[i] * strides_[i];
        rest /= shape_[i];
      }
      fn(at);
    }
  }

  template <class T>
  T& slot(int64_t at) {
    return reinterpret_cast<T*>(image_.data())[at];
  }
  template <class T>
  const T& slot(int64_t at) const {
    return reinterpret_cast<const T*>(image_.data())[at];
  }

  void store(int64_t at, double value) {
    // A NaN or infinity becomes a wild number: reading it as an index or a length must not happen.
    const bool finite = value - value == 0.0;
    const auto whole = finite ? static_cast<int64_t>(value) : int64_t{-2000000000};
    switch (dtype_) {
      case DType::kFloat32:
        slot<float>(at) = static_cast<float>(value);
        break;
      case DType::kFloat64:
        slot<double>(at) = value;
        break;
      case DType::kFloat16:
        slot<fp16>(at) = from_float<fp16>(static_cast<float>(value));
        break;
      case DType::kBFloat16:
        slot<bf16>(at) = from_float<bf16>(static_cast<float>(value));
        break;
      case DType::kInt32:
        slot<int32_t>(at) = static_cast<int32_t>(whole);
        break;
      case DType::kInt64:
        slot<int64_t>(at) = whole;
        break;
      case DType::kUInt8:
      case DType::kBool:
        slot<uint8_t>(at) = finite ? static_cast<uint8_t>(whole) : 1;
        break;
    }
  }

  double load(int64_t at) const {
    switch (dtype_) {
      case DType::kFloat32:
        return slot<float>(at);
      case DType::kFloat64:
        return slot<double>(at);
      case DType::kFloat16:
        return to_float(slot<fp16>(at));
      case DType::kBFloat16:
        return to_float(slot<bf16>(at));
      case DType::kInt32:
        return slot<int32_t>(at);
      case DType::kInt64:
        return static_cast<double>(slot<int64_t>(at));
      case DType::kUInt8:
      case DType::kBool:
        return slot<uint8_t>(at);
    }
    return 0.0;
  }

  Device device_;
  DType dtype_ = DType::kFloat32;
  std::vector<int64_t> shape_;
  std::vector<int64_t> strides_;
  int64_t num_elements_ = 0;
  std::vector<uint8_t> image_;
  std::vector<uint8_t> original_;
  std::shared_ptr<DeviceBuffer> buffer_;
};

}  // namespace astrai::testing
