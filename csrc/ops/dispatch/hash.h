// One hash for what is looked up or marked by numbers and words, the same in every process: FNV-1a, of a number in one step.
#pragma once
#include <cstdint>
#include <span>
#include <string_view>

namespace ai3::ops {

class Hash {
 public:
  Hash() = default;
  explicit Hash(uint64_t so_far) : value_(so_far) {}
  Hash& add(uint64_t number) {
    value_ = (value_ ^ number) * kPrime;
    value_ ^= value_ >> 32;
    return *this;
  }
  Hash& add(std::span<const int64_t> numbers) {
    for (const int64_t n : numbers) add(static_cast<uint64_t>(n));
    return *this;
  }
  // Byte by byte.
  Hash& add(std::string_view text) {
    for (const char c : text) value_ = (value_ ^ static_cast<unsigned char>(c)) * kPrime;
    return *this;
  }
  uint64_t value() const { return value_; }

 private:
  static constexpr uint64_t kPrime = 0x100000001b3u;
  uint64_t value_ = 0xcbf29ce484222325u;
};

}  // namespace ai3::ops
