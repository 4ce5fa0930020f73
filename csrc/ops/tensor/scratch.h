// Memory for CPU workspaces, kept between calls: pages fresh from the system cost more than many a kernel does
// (docs/decisions/memory.md).
#pragma once
#include <cstdint>
#include <exception>

// Of the C interface that Python calls.
#define AI3_EXPORT [[gnu::visibility("default")]]

namespace ai3::ops {

// What the system does not give; operators say it with their name.
struct NotEnoughMemory : std::exception {
  explicit NotEnoughMemory(int64_t bytes) : bytes(bytes) {}
  int64_t bytes;
};

inline constexpr int64_t kHugePage = int64_t{2} << 20;
// Asks for huge pages in what lies whole in them: in small ones, streaming through megabytes is a TLB miss every 4 KiB.
void ask_for_huge_pages(const void* data, int64_t bytes);

// 64-byte aligned, not initialized. Any number at once, of any threads: each has its own.
class Scratch {
 public:
  explicit Scratch(int64_t bytes);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  char* data() const { return data_; }

 private:
  char* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace ai3::ops
