// Memory with guard pages, the levels of this machine, and the list of algorithms.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include "../../csrc/algos/core/algorithm.h"
#include "../../csrc/algos/core/level.h"

extern "C" {
extern const ai3::AlgorithmInfo* const __start_ai3_algorithms[];
extern const ai3::AlgorithmInfo* const __stop_ai3_algorithms[];
}

// Which end of the buffer lies against a page that must not be touched; before the beginning there is one, too.
enum class Flush { begin, end };

// Exactly `bytes` bytes between two inaccessible pages, filled with 0xff: NaN in every floating-point type.
class Guarded {
 public:
  Guarded(int64_t bytes, Flush flush) {
    const size_t payload = (static_cast<size_t>(bytes) + kPage - 1) / kPage * kPage;
    length_ = payload + 2 * kPage;
    base_ = static_cast<char*>(mmap(nullptr, length_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base_ == MAP_FAILED || mprotect(base_ + kPage, payload, PROT_READ | PROT_WRITE)) std::abort();
    std::memset(base_ + kPage, 0xff, payload);
    data_ = base_ + kPage + (flush == Flush::end ? payload - static_cast<size_t>(bytes) : 0);
  }
  Guarded(const Guarded&) = delete;
  ~Guarded() { munmap(base_, length_); }

  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  // From here on writing is a fault as well.
  void protect() const { mprotect(base_ + kPage, length_ - 2 * kPage, PROT_READ); }

 private:
  static constexpr size_t kPage = 4096;
  size_t length_;
  char *base_, *data_;
};

// Whether this processor runs code of the level; `counting` is plain code.
inline bool usable(const std::string& level) {
  const auto levels = ai3::usable_levels();
  return level == "counting" || std::find(levels.begin(), levels.end(), level) != levels.end();
}

inline const ai3::AlgorithmInfo* algorithm(const std::string& level, const std::string& operation, const std::string& name) {
  for (auto a = __start_ai3_algorithms; a != __stop_ai3_algorithms; a++)
    if (level == (*a)->level && operation == (*a)->operation && name == (*a)->name) return *a;
  return nullptr;
}

// Named by the handler of a fault; see main.cpp.
extern char current_case[512];

// Scalar multiplications since the last call, of the level `counting`.
int64_t take_multiplications();
