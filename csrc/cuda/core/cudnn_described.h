// What speaks with cuDNN: its statuses in words, and descriptors of its graph interface. Nothing here needs a GPU, so that a test
// asks the real cuDNN through it (tests/cpp/cudnn_asked_test.cpp).
#pragma once
#include <cudnn.h>

#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../../algos/core/dtype.h"

namespace ai3::inline AI3_LEVEL {

inline std::string words_of(cudnnStatus_t status) {
  char more[256] = "";
  cudnnGetLastErrorString(more, sizeof(more));
  return std::string(cudnnGetErrorString(status)) + (*more ? std::string(": ") + more : "");
}
inline void check_cudnn(cudnnStatus_t status, const char* what) {
  if (status != CUDNN_STATUS_SUCCESS) throw std::runtime_error(std::string("ai3: ") + what + ": " + words_of(status));
}

// What says that this method, of this problem, is not for this device. Other categories, and the rest of this one, say that the
// call or the installation is wrong: as a refusal that would be kept, and nobody would hear of it.
inline bool is_refusal(cudnnStatus_t status) {
  switch (static_cast<int>(status)) {
    case 3000:  // NOT_SUPPORTED, and in particular
    case 3001:  // GRAPH_PATTERN
    case 3002:  // SHAPE
    case 3003:  // DATA_TYPE
    case 3004:  // LAYOUT
    case 3007:  // ARCH_MISMATCH
    case 3010:  // SHARED_MEMORY_INSUFFICIENT
    case 3011:  // PADDING
      return true;
    default: return false;
  }
}

inline cudnnDataType_t cudnn_type(DType type) {
  return type == DType::f64    ? CUDNN_DATA_DOUBLE
         : type == DType::f32  ? CUDNN_DATA_FLOAT
         : type == DType::bf16 ? CUDNN_DATA_BFLOAT16
                               : CUDNN_DATA_HALF;
}

// A descriptor of the graph interface, destroyed with its owner. What it refers to may be destroyed before it, once it is
// finalized.
class Described {
 public:
  explicit Described(cudnnBackendDescriptorType_t type) {
    check_cudnn(cudnnBackendCreateDescriptor(type, &descriptor_), "cudnnBackendCreateDescriptor");
  }
  Described(Described&& other) noexcept : descriptor_(std::exchange(other.descriptor_, nullptr)) {}
  ~Described() {
    if (descriptor_) cudnnBackendDestroyDescriptor(descriptor_);
  }
  Described(const Described&) = delete;
  Described& operator=(const Described&) = delete;
  operator cudnnBackendDescriptor_t() const { return descriptor_; }

  void set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t count, const void* values) {
    check_cudnn(cudnnBackendSetAttribute(descriptor_, name, type, count, values), "cudnnBackendSetAttribute");
  }
  void set(cudnnBackendAttributeName_t name, std::initializer_list<int64_t> numbers) {
    set(name, CUDNN_TYPE_INT64, static_cast<int64_t>(numbers.size()), numbers.begin());
  }
  void set(cudnnBackendAttributeName_t name, const Described& other) {
    set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &other.descriptor_);
  }
  void finalize() { check_cudnn(cudnnBackendFinalize(descriptor_), "cudnnBackendFinalize"); }
  // Finalizes it. False, with cuDNN's words, where that refuses.
  bool is_possible(std::string& words) {
    const cudnnStatus_t status = cudnnBackendFinalize(descriptor_);
    if (is_refusal(status)) return words = "cuDNN refuses: " + words_of(status), false;
    check_cudnn(status, "cudnnBackendFinalize");
    return true;
  }

  int64_t number(cudnnBackendAttributeName_t name) const {
    int64_t value = 0;
    get(name, CUDNN_TYPE_INT64, 1, &value);
    return value;
  }
  template <class Note>
  std::vector<Note> notes(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type) const {
    std::vector<Note> all(32);
    all.resize(static_cast<size_t>(get(name, type, 32, all.data())));
    return all;
  }
  // The descriptors that it has, each of the given type.
  std::vector<Described> others(cudnnBackendAttributeName_t name, cudnnBackendDescriptorType_t type) const {
    std::vector<Described> all;
    std::vector<cudnnBackendDescriptor_t> places;
    for (int64_t count = get(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 0, nullptr); count > 0; count--)
      places.push_back(all.emplace_back(type));
    const auto most = static_cast<int64_t>(places.size());
    const int64_t count = most ? get(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, most, places.data()) : 0;
    while (static_cast<int64_t>(all.size()) > count) all.pop_back();
    return all;
  }

 private:
  // Writes at most `most` values, and returns how many there are.
  int64_t get(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t most, void* values) const {
    int64_t count = 0;
    check_cudnn(cudnnBackendGetAttribute(descriptor_, name, type, most, &count, values), "cudnnBackendGetAttribute");
    return count;
  }
  cudnnBackendDescriptor_t descriptor_ = nullptr;
};

}  // namespace ai3::inline AI3_LEVEL
