// Memory with guard pages, the levels of this machine, and the list of algorithms.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <utility>

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
  Guarded(int64_t bytes, Flush flush) : payload_((static_cast<size_t>(bytes) + kPage - 1) / kPage * kPage) {
    auto& free = unused();
    if (const auto found = free.find(payload_); found != free.end()) {
      pages_ = found->second;
      free.erase(found);
    } else {
      void* base = mmap(nullptr, payload_ + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (base == MAP_FAILED) std::abort();
      pages_ = static_cast<char*>(base) + kPage;
    }
    access(PROT_READ | PROT_WRITE);
    std::memset(pages_, 0xff, payload_);
    data_ = pages_ + (flush == Flush::end ? payload_ - static_cast<size_t>(bytes) : 0);
  }
  Guarded(Guarded&& other) noexcept
      : payload_(other.payload_), pages_(std::exchange(other.pages_, nullptr)), data_(other.data_) {}
  ~Guarded() {
    if (pages_) unused().emplace(payload_, pages_);
  }

  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  // From here on writing is a fault as well.
  void protect() const { access(PROT_READ); }

 private:
  static constexpr size_t kPage = 4096;
  // Kept for the next of that size: the operating system takes longer for new pages than most kernels for their work.
  static std::multimap<size_t, char*>& unused() {
    static thread_local std::multimap<size_t, char*> pages;
    return pages;
  }
  void access(int rights) const {
    if (mprotect(pages_, payload_, rights)) std::abort();
  }
  size_t payload_;
  char *pages_, *data_;
};

// Whether this processor runs code of the level; `counting` is plain code, as `cuda` is here.
inline bool usable(const std::string& level) {
  const auto levels = ai3::usable_levels();
  return level == "counting" || level == "cuda" || std::find(levels.begin(), levels.end(), level) != levels.end();
}

// Whether all is to be run (make test-full), of which otherwise some stands for the rest.
inline bool at_full_size() {
  const char* const profile = std::getenv("AI3_OPS_TEST_PROFILE");
  return profile && std::string(profile) == "full";
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
