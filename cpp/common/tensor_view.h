// A borrowed tensor: pointer, shape, strides in elements, dtype and device. Owns nothing.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "common/check.h"
#include "common/dtype.h"

namespace astrai {

enum class DeviceType : uint8_t { kCpu, kCuda };

struct Device {
  DeviceType type = DeviceType::kCpu;
  int index = 0;
  bool operator==(const Device&) const = default;
};

inline std::string device_name(Device device) {
  return device.type == DeviceType::kCpu ? "cpu" : concat("cuda:", device.index);
}

struct TensorView {
  static constexpr int kMaxDims = 6;

  void* data = nullptr;  // address of the first element
  DType dtype = DType::kFloat32;
  Device device;
  int ndim = 0;
  std::array<int64_t, kMaxDims> shape{};
  std::array<int64_t, kMaxDims> strides{};  // in elements; may be 0 or negative

  // A contiguous view of host memory, for tests and for the runtime's own buffers.
  static TensorView contiguous(void* data, DType dtype, std::initializer_list<int64_t> shape,
                               Device device = {}) {
    TensorView view;
    view.data = data;
    view.dtype = dtype;
    view.device = device;
    view.ndim = static_cast<int>(shape.size());
    int i = 0;
    for (int64_t extent : shape) view.shape[i++] = extent;
    view.set_contiguous_strides();
    return view;
  }

  void set_contiguous_strides() {
    int64_t stride = 1;
    for (int i = ndim - 1; i >= 0; --i) {
      strides[i] = stride;
      stride *= shape[i] > 1 ? shape[i] : 1;
    }
  }

  int64_t numel() const {
    int64_t count = 1;
    for (int i = 0; i < ndim; ++i) count *= shape[i];
    return count;
  }

  bool is_contiguous() const {
    if (numel() == 0) return true;
    int64_t expected = 1;
    for (int i = ndim - 1; i >= 0; --i) {
      if (shape[i] != 1 && strides[i] != expected) return false;
      expected *= shape[i];
    }
    return true;
  }

  template <class T>
  T* ptr() const {
    return static_cast<T*>(data);
  }

  std::string shape_string() const {
    std::string text = "[";
    for (int i = 0; i < ndim; ++i) text += concat(i ? ", " : "", shape[i]);
    return text + "]";
  }
};

}  // namespace astrai
