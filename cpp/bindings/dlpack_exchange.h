// The C table through which a tensor type hands out views without a Python call (DLPack 1.2 and
// later, `__dlpack_c_exchange_api__`). Declared here as far as it is used: its layout is an ABI
// that a producer may only change together with the major version.
#pragma once

#include <cstdint>

namespace astrai::bindings::dlpack {

constexpr uint32_t kMajorVersion = 1;
constexpr const char* kTypeAttribute = "__dlpack_c_exchange_api__";
constexpr const char* kCapsuleName = "dlpack_exchange_api";

// Values of Device::type and DataType::code that astrai understands.
enum DeviceCode : int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };
enum TypeCode : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6 };

struct Version {
  uint32_t major;
  uint32_t minor;
};

struct Device {
  int32_t type;
  int32_t id;
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null = contiguous, before version 1.2
  uint64_t byte_offset;
};

struct ExchangeHeader {
  Version version;
  ExchangeHeader* previous;  // an older table of the same producer, or null
};

struct ExchangeApi {
  ExchangeHeader header;
  void* allocate;
  void* managed_from_py_object;
  void* managed_to_py_object;
  // Fills a view that the object keeps owning. The shape and stride arrays are valid until control
  // returns to the producer. Nullable. Returns 0, or -1 with a Python error set.
  int (*view_from_py_object)(void* object, Tensor* out);
  // Stores the stream that the library queues work of a device on. Nullable. Returns as above.
  int (*current_work_stream)(int32_t device_type, int32_t device_id, void** out);
};

}  // namespace astrai::bindings::dlpack
