#include "plan.h"

namespace ai3::ops::program {
namespace {

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (char c : text)
    if (c == '"' || c == '\\')
      out += '\\', out += c;
    else
      out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;  // a tab, or the end of a line of two characters
  return out + '"';
}

}  // namespace

std::string describe(const Plan& plan) {
  const auto inputs = plan.program.inputs;
  auto where = [&](const Place& place) -> std::string {
    if (place.base < 0) return "null";
    const int32_t i = place.base - 1;
    const std::string base = place.base == 0 ? "arena"
                             : i < inputs    ? "input " + std::to_string(i)
                             : i == inputs   ? "constants"
                                             : "output " + std::to_string(i - inputs - 1);
    return std::string("[\"") + base + "\"," + std::to_string(place.offset) + "]";
  };
  std::string json = "{\"arena_bytes\":" + std::to_string(plan.arena_bytes) +
                     ",\"live_bytes\":" + std::to_string(plan.live_bytes) + ",\"steps\":[";
  for (const Call& step : plan.steps) {
    if (json.back() != '[') json += ',';
    json += "{\"line\":" + std::to_string(step.line->number) + ",\"text\":" + quoted(step.line->text) +
            ",\"operation\":" + quoted(step.copies ? "copy" : step.line->operation) + ",\"sizes\":[";
    for (size_t d = 0; d < step.sizes.size(); d++) json.append(d ? "," : "").append(std::to_string(step.sizes[d]));
    json += "],\"row\":" + std::to_string(step.output_row) + ",\"workspace_bytes\":" + std::to_string(step.workspace_bytes) +
            ",\"workspace\":" + where(step.workspace) + ",\"input\":" + where(step.input) + ",\"output\":" + where(step.output) +
            "}";
  }
  return json + "]}";
}

}  // namespace ai3::ops::program
