// A map that every call looks into, in parts with a lock each, so that threads seldom meet; safe across fork().
#pragma once
#include <array>
#include <mutex>
#include <unordered_map>

#include "fork.h"

namespace ai3::ops {

// By integers that no caller chooses. One variable of a type: it is never destroyed, since threads may still call when the
// process ends, and PyTorch's allocator may be gone.
template <class Value>
class Sharded {
 public:
  struct alignas(64) Part {
    std::mutex mutex;
    std::unordered_map<int64_t, Value> map;
  };
  static Part& part_of(int64_t id) {
    static_cast<void>(at_fork_);  // so that it is there
    return parts_[static_cast<uint64_t>(id) * 0x9e3779b97f4a7c15u >> 58];
  }

 private:
  inline static std::array<Part, 64>& parts_ = *new std::array<Part, 64>();
  inline static const int at_fork_ = guard_at_fork(
      [] {
        for (Part& part : parts_) part.mutex.lock();
      },
      [] {
        for (Part& part : parts_) part.mutex.unlock();
      });
};

}  // namespace ai3::ops
