#include "numbers.h"

#include <charconv>
#include <stdexcept>

#include "../dispatch/hash.h"
#include "../dispatch/registry.h"
#include "../dispatch/sharded.h"
#include "../tensor/scratch.h"

namespace ai3::ops {
namespace {

std::vector<Number> parsed(const std::string& text) {
  std::vector<Number> list;
  const char *at = text.data(), *const end = at + text.size();
  while (at < end) {
    const char* stop = at;
    while (stop != end && *stop != ' ') stop++;
    Number n{Number::Kind::none, 0, 0};
    auto is = [&](auto& value) {
      const auto [rest, error] = std::from_chars(at, stop, value);
      return error == std::errc() && rest == stop;
    };
    if (is(n.whole))
      n.kind = Number::Kind::whole, n.real = static_cast<double>(n.whole);
    else if (is(n.real))
      n.kind = Number::Kind::real;
    else if (std::string(at, stop) != "-")
      throw std::runtime_error("needs numbers between spaces, got '" + text + "'");
    list.push_back(n);
    at = stop == end ? end : stop + 1;
  }
  return list;
}

// From the text alone, so that it is the same in every process.
int64_t id_of(const std::string& text) { return static_cast<int64_t>(Hash().add(text).value() >> 2) | 1; }

struct Cached {
  std::shared_ptr<const Numbers> numbers;
  int64_t owners;
};
using Parts = Sharded<Cached>;

int64_t keep(const std::string& text) {
  auto numbers = std::make_shared<const Numbers>(Numbers{text, parsed(text)});
  for (int64_t id = id_of(text);; id += 2) {  // the next one where another text has the same
    Parts::Part& part = Parts::part_of(id);
    const std::lock_guard lock(part.mutex);
    Cached& place = part.map[id];
    if (!place.numbers) place = {std::move(numbers), 0};
    if (place.numbers->text != text) continue;
    place.owners++;
    return id;
  }
}

}  // namespace

std::shared_ptr<const Numbers> numbers_known(int64_t id) {
  Parts::Part& part = Parts::part_of(id);
  {
    const std::lock_guard lock(part.mutex);
    if (const auto found = part.map.find(id); found != part.map.end()) return found->second.numbers;
  }
  throw std::runtime_error("knows no numbers " + std::to_string(id) + ": ai3_numbers_keep gives theirs to a text");
}

}  // namespace ai3::ops

// Keeps the numbers of a text until ai3_numbers_free is called as often as this; returns the integer that names them, 0 on
// failure.
extern "C" AI3_EXPORT int64_t ai3_numbers_keep(const char* text, char* error, int64_t size) {
  return ai3::ops::guarded(error, size, [&] { return ai3::ops::keep(text); });
}
extern "C" AI3_EXPORT void ai3_numbers_free(int64_t id) {
  std::shared_ptr<const ai3::ops::Numbers> numbers;  // destroyed when no lock is held
  ai3::ops::Parts::Part& part = ai3::ops::Parts::part_of(id);
  const std::lock_guard lock(part.mutex);
  const auto found = part.map.find(id);
  if (found == part.map.end() || --found->second.owners > 0) return;
  numbers = std::move(found->second.numbers);
  part.map.erase(found);
}
