#include "scratch.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace ai3::ops {
namespace {

constexpr int kCachedBytes = 256 << 20;
constexpr int kCachedBlocks = 64;

struct Block {
  char* data;
  int64_t bytes;
};
// A stack, so that one thread alone has one block, warm in its cache, which grows to what its largest call needs. Never waited
// for: where another thread is at it, or was when the process was forked, memory comes from the system and goes back there.
std::mutex mutex;
Block cached[kCachedBlocks];
int cached_blocks = 0;
int64_t cached_bytes = 0;

#ifdef __GLIBC__
bool is_set(const char* name, const char* within = "") {
  const char* value = std::getenv(name);
  return value && std::strstr(value, within);
}

// glibc gives the end of its heap back to the system when that is longer than M_TRIM_THRESHOLD (mallopt(3)), 128 KiB at first:
// outputs then come in fresh pages in every call, which take longer to get than many an output to compute
// (docs/decisions/memory.md). What the user has set in the environment stays as it is.
[[gnu::constructor]] void keep_heap() {
  for (const char* name : {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}) {
    if (is_set(name)) return;
  }
  if (is_set("GLIBC_TUNABLES", "glibc.malloc.")) return;
  mallopt(M_TRIM_THRESHOLD, kCachedBytes);
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // the largest that glibc takes: larger blocks are mappings of their own
}
#endif

}  // namespace

void ask_for_huge_pages([[maybe_unused]] const void* data, [[maybe_unused]] int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr auto page = static_cast<uintptr_t>(kHugePage);
  const auto begin = reinterpret_cast<uintptr_t>(data), first = (begin + page - 1) / page * page,
             end = (begin + static_cast<uintptr_t>(bytes)) / page * page;
  if (end > first) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#endif
}

Scratch::Scratch(int64_t bytes) {
  if (bytes == 0) return;
  if (const std::unique_lock lock(mutex, std::try_to_lock); lock && cached_blocks > 0) {
    const Block block = cached[--cached_blocks];
    cached_bytes -= block.bytes;
    data_ = block.data, bytes_ = block.bytes;
  }
  if (bytes_ >= bytes) return;
  std::free(data_);
  const int64_t unit = bytes < kHugePage ? 64 : kHugePage;
  bytes_ = (bytes + unit - 1) / unit * unit;
  data_ = static_cast<char*>(std::aligned_alloc(static_cast<size_t>(unit), static_cast<size_t>(bytes_)));
  if (!data_) throw NotEnoughMemory(bytes);
  ask_for_huge_pages(data_, bytes_);
}

Scratch::~Scratch() {
  if (!data_) return;
  const std::unique_lock lock(mutex, std::try_to_lock);
  // One block whatever its size: in fresh pages a network's activations take longer to get than to compute.
  if (lock && cached_blocks < kCachedBlocks && (cached_blocks == 0 || cached_bytes + bytes_ <= kCachedBytes)) {
    cached[cached_blocks++] = {data_, bytes_};
    cached_bytes += bytes_;
  } else {
    std::free(data_);
  }
}

}  // namespace ai3::ops

// Fills the cached memory with a byte, so that tests see what is read before it is written.
extern "C" AI3_EXPORT void ai3_fill_workspace(int byte) {
  using namespace ai3::ops;
  const std::lock_guard lock(mutex);
  for (int i = 0; i < cached_blocks; i++) std::memset(cached[i].data, byte, static_cast<size_t>(cached[i].bytes));
}

// Gives the cached memory back to the system; returns how many bytes that was: 0, too, where another thread is at it.
extern "C" AI3_EXPORT int64_t ai3_release_workspace() {
  using namespace ai3::ops;
  const std::unique_lock lock(mutex, std::try_to_lock);
  if (!lock) return 0;
  const int64_t released = cached_bytes;
  while (cached_blocks > 0) std::free(cached[--cached_blocks].data);
  cached_bytes = 0;
#ifdef __GLIBC__
  malloc_trim(0);  // small blocks are parts of the heap
#endif
  return released;
}
