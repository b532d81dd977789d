#include "bindings/tensor_arg.h"

#include <string>
#include <unordered_map>

#include "bindings/dlpack_exchange.h"

namespace astrai::bindings {

namespace {

// The exchange table of a tensor type, or null if it has none of our version.
const dlpack::ExchangeApi* find_exchange_api(PyTypeObject* type) {
  PyObject* capsule =
      PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), dlpack::kTypeAttribute);
  if (capsule == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  const nb::object owner = nb::steal(capsule);
  auto* header =
      static_cast<dlpack::ExchangeHeader*>(PyCapsule_GetPointer(capsule, dlpack::kCapsuleName));
  if (header == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  while (header != nullptr && header->version.major != dlpack::kMajorVersion) {
    header = header->previous;
  }
  const auto* api = reinterpret_cast<const dlpack::ExchangeApi*>(header);
  return api != nullptr && api->view_from_py_object != nullptr ? api : nullptr;
}

// Looked up once per type. Types stay referenced, so that no address is ever reused by another one;
// the GIL guards the cache.
const dlpack::ExchangeApi* exchange_api(PyTypeObject* type) {
  static PyTypeObject* last_type = nullptr;
  static const dlpack::ExchangeApi* last_api = nullptr;
  if (type == last_type) return last_api;
  static std::unordered_map<PyTypeObject*, const dlpack::ExchangeApi*> cache;
  auto found = cache.find(type);
  if (found == cache.end()) {
    found = cache.emplace(type, find_exchange_api(type)).first;
    Py_INCREF(type);
  }
  last_type = type;
  last_api = found->second;
  return last_api;
}

std::string found_type(nb::handle object) {
  return Py_TYPE(object.ptr())->tp_name;
}

// Producers append a stack trace to their messages.
std::string first_line(const nb::python_error& error) {
  const std::string text = nb::str(error.value()).c_str();
  return text.substr(0, text.find('\n'));
}

bool requires_grad(nb::handle object) {
  static PyObject* const name = PyUnicode_InternFromString("requires_grad");
  PyObject* flag = PyObject_GetAttr(object.ptr(), name);
  if (flag == nullptr) {
    PyErr_Clear();
    return false;
  }
  const bool required = flag == Py_True;
  Py_DECREF(flag);
  return required;
}

// A kernel would cut the autograd graph without a word.
void check_no_gradient_lost(const char* op, const char* name) {
  nb::object torch = nb::module_::import_("torch");
  ASTRAI_CHECK_ARG(!nb::cast<bool>(torch.attr("is_grad_enabled")()), op, ": ", name,
                   " requires grad while gradients are enabled; expected torch.no_grad() or a "
                   "detached tensor (kernels have no backward pass)");
}

DType to_dtype(const char* op, const char* name, nb::handle object, dlpack::DataType dtype) {
  if (dtype.lanes == 1) {
    switch (dtype.code << 8 | dtype.bits) {
      case dlpack::kFloat << 8 | 32:
        return DType::kFloat32;
      case dlpack::kFloat << 8 | 16:
        return DType::kFloat16;
      case dlpack::kBfloat << 8 | 16:
        return DType::kBFloat16;
      case dlpack::kFloat << 8 | 64:
        return DType::kFloat64;
      case dlpack::kInt << 8 | 32:
        return DType::kInt32;
      case dlpack::kInt << 8 | 64:
        return DType::kInt64;
      case dlpack::kUInt << 8 | 8:
        return DType::kUInt8;
      case dlpack::kBool << 8 | 8:
        return DType::kBool;
      default:
        break;
    }
  }
  std::string found =
      concat("code ", static_cast<int>(dtype.code), " of ", static_cast<int>(dtype.bits), " bits");
  if (nb::hasattr(object, "dtype")) {
    const nb::object own_name = object.attr("dtype");
    found = nb::str(own_name).c_str();
  }
  throw std::invalid_argument(
      concat(op, ": ", name, " has dtype ", found,
             "; expected a dtype that some kernel takes: float32, float16, bfloat16, int32, "
             "int64, uint8 or bool"));
}

Device to_device(const char* op, const char* name, int32_t type, int32_t index) {
  switch (type) {
    case dlpack::kCpu:
    case dlpack::kCudaHost:
      return {DeviceType::kCpu, 0};
    case dlpack::kCuda:
    case dlpack::kCudaManaged:
      return {DeviceType::kCuda, index};
    default:
      throw std::invalid_argument(concat(op, ": ", name, " is on a device of DLPack type ", type,
                                         "; expected the CPU or a CUDA device"));
  }
}

TensorView to_view(const char* op, const char* name, nb::handle object,
                   const dlpack::Tensor& tensor) {
  ASTRAI_CHECK_ARG(tensor.ndim >= 0 && tensor.ndim <= TensorView::kMaxDims, op, ": ", name, " has ",
                   tensor.ndim, " dimensions; expected 0 to ", TensorView::kMaxDims);
  TensorView view;
  view.dtype = to_dtype(op, name, object, tensor.dtype);
  view.device = to_device(op, name, tensor.device.type, tensor.device.id);
  view.ndim = tensor.ndim;
  int64_t contiguous_stride = 1;
  for (int i = tensor.ndim - 1; i >= 0; --i) {
    view.shape[i] = tensor.shape[i];
    view.strides[i] = tensor.strides != nullptr ? tensor.strides[i] : contiguous_stride;
    contiguous_stride *= tensor.shape[i];
  }
  // The strides of a tensor without elements address nothing; libraries disagree on them.
  if (view.numel() == 0) view.set_contiguous_strides();
  ASTRAI_CHECK_ARG(tensor.data != nullptr || view.numel() == 0, op, ": ", name,
                   " has no memory behind it; expected a tensor with storage");
  if (tensor.data != nullptr) view.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  return view;
}

BorrowedTensor borrow_through_table(const char* op, const char* name, nb::handle object,
                                    const dlpack::ExchangeApi& api) {
  if (requires_grad(object)) check_no_gradient_lost(op, name);
  dlpack::Tensor tensor;
  if (api.view_from_py_object(object.ptr(), &tensor) != 0) {
    const nb::python_error cause;
    throw std::invalid_argument(concat(op, ": ", name, " cannot be read through DLPack (",
                                       first_line(cause),
                                       "); expected a dense CPU or CUDA tensor"));
  }
  return BorrowedTensor(to_view(op, name, object, tensor));
}

BorrowedTensor borrow_through_python(const char* op, const char* name, nb::handle object,
                                     Access access) {
  nb::object source = nb::borrow(object);
  if (requires_grad(object)) {
    check_no_gradient_lost(op, name);
    source = object.attr("detach")();  // older torch exports no tensor that requires grad
  }
  nb::ndarray<nb::ro> array;
  if (!nb::try_cast(source, array, /*convert=*/false)) {
    if (nb::hasattr(object, "__dlpack__")) {
      throw std::invalid_argument(
          concat(op, ": ", name, " is a ", found_type(object),
                 " that cannot be read through DLPack; expected a dense tensor with native byte "
                 "order and strides that are whole elements"));
    }
    throw nb::type_error(concat(op, ": ", name, " is a ", found_type(object),
                                "; expected a tensor that speaks DLPack (torch, numpy)")
                             .c_str());
  }
  if (access == Access::kWrite) {
    nb::ndarray<> writable;
    ASTRAI_CHECK_ARG(nb::try_cast(source, writable, /*convert=*/false), op, ": ", name,
                     " is read-only; expected writable memory");
  }
  int64_t shape[TensorView::kMaxDims];
  int64_t strides[TensorView::kMaxDims];
  const int32_t ndim = static_cast<int32_t>(array.ndim());
  for (int32_t i = 0; i < ndim && i < TensorView::kMaxDims; ++i) {
    shape[i] = static_cast<int64_t>(array.shape(i));
    strides[i] = array.stride(i);
  }
  const nb::dlpack::dtype dtype = array.dtype();
  const dlpack::Tensor tensor{.data = const_cast<void*>(array.data()),
                              .device = {array.device_type(), array.device_id()},
                              .ndim = ndim,
                              .dtype = {dtype.code, dtype.bits, dtype.lanes},
                              .shape = shape,
                              .strides = strides,
                              .byte_offset = 0};
  return BorrowedTensor(to_view(op, name, object, tensor), std::move(array));
}

// Of libraries without the table only torch can be asked, and only if somebody imported it.
void* current_torch_stream(int device_index) {
  const nb::object modules = nb::module_::import_("sys").attr("modules");
  const nb::object torch = modules.attr("get")("torch");
  if (torch.is_none()) return nullptr;
  const nb::object stream = torch.attr("cuda").attr("current_stream")(device_index);
  return reinterpret_cast<void*>(nb::cast<uintptr_t>(stream.attr("cuda_stream")));
}

// The stream of a tensor's device that its library currently queues work on.
void* current_stream(nb::handle tensor, int device_index) {
  const dlpack::ExchangeApi* api = exchange_api(Py_TYPE(tensor.ptr()));
  if (api == nullptr || api->current_work_stream == nullptr) {
    return current_torch_stream(device_index);
  }
  void* stream = nullptr;
  if (api->current_work_stream(dlpack::kCuda, device_index, &stream) != 0) throw nb::python_error();
  return stream;
}

}  // namespace

void* stream_for(const char* op, const StreamArg& stream, const TensorArg& arg,
                 const BorrowedTensor& tensor) {
  const auto given = read(op, "stream", stream);
  ASTRAI_CHECK_ARG(!given || *given >= 0, op, ": stream is ", given.value_or(0),
                   "; expected a cudaStream_t as an int, or None");
  const Device device = tensor.view().device;
  if (device.type == DeviceType::kCpu) return nullptr;
  return given ? reinterpret_cast<void*>(*given) : current_stream(arg.object(), device.index);
}

BorrowedTensor borrow(const char* op, const char* name, const TensorArg& arg, Access access) {
  const nb::handle object = arg.object();
  if (const dlpack::ExchangeApi* api = exchange_api(Py_TYPE(object.ptr()))) {
    return borrow_through_table(op, name, object, *api);
  }
  return borrow_through_python(op, name, object, access);
}

}  // namespace astrai::bindings
