// Runs saved networks by <ai3_ops/model.h>, in a process without Python:
//
//   runner run <file> <inputs.pt> <expected.pt>     four threads at once; every output equals the expected one, bit for bit
//   runner refuse <file>                            prints why it cannot be loaded
//   runner mutate <file> <inputs.pt> <copy> <n>     n files with random changes, every second one with checksums that fit again:
//                                                   each is refused, or runs; prints how many were refused
#include <ai3_ops/model.h>

#include <algorithm>
#include <iostream>
#include <iterator>
#include <random>
#include <thread>

#include "../without_python.h"

namespace {

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

void run(const std::string& path, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& expected) {
  const ai3::Model model = ai3::Model::load(path);
  std::string wrong[4];
  auto check = [&](std::string& wrong) {
    try {
      for (int i = 0; i < 5; i++) {
        const std::vector<at::Tensor> outputs = model.run(inputs);
        if (outputs.size() != expected.size()) throw std::runtime_error("got " + std::to_string(outputs.size()) + " outputs");
        for (size_t o = 0; o < outputs.size(); o++)
          if (!at::equal(outputs[o], expected[o])) throw std::runtime_error("output " + std::to_string(o) + " differs");
      }
    } catch (const std::exception& error) {
      wrong = error.what();
    }
  };
  std::vector<std::thread> callers;
  for (std::string& w : wrong) callers.emplace_back(check, std::ref(w));
  for (std::thread& t : callers) t.join();
  for (const std::string& w : wrong)
    if (!w.empty()) throw std::runtime_error(w);
  if (has_python()) throw std::runtime_error("a Python library is loaded");
}

// With the checksums that belong to its contents.
std::string sealed(const nlohmann::json& document, const nlohmann::json& checks, nlohmann::json header,
                   const std::string& tensors) {
  const std::string text = nlohmann::json{{"document", document}, {"checks", checks}}.dump();
  header["__metadata__"] = {{"ai3_ops", text}, {"check", std::to_string(ai3::detail::checksum(text.data(), text.size()))}};
  std::string raw = header.dump();
  raw.append((64 - (8 + raw.size()) % 64) % 64, ' ');
  const uint64_t length = raw.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + raw + tensors;
}

void mutate(const std::string& path, const std::vector<at::Tensor>& inputs, const std::string& copy, int count) {
  const std::string original = read_file(path);
  uint64_t length = 0;
  std::memcpy(&length, original.data(), 8);
  const auto header = nlohmann::json::parse(original.substr(8, length));
  const auto content = nlohmann::json::parse(header.at("__metadata__").at("ai3_ops").get<std::string>());
  const std::string tensors = original.substr(8 + length);
  const nlohmann::json flat = content.at("document").flatten();
  std::vector<std::string> places;
  for (const auto& [place, value] : flat.items())
    if (place.rfind("/report", 0) != 0) places.push_back(place);
  std::mt19937 random(7);
  auto below = [&](size_t n) { return std::uniform_int_distribution<size_t>(0, n - 1)(random); };
  int refused = 0;
  for (int i = 0; i < count; i++) {
    std::string bytes = original;
    if (i % 2 == 0) {  // a byte, anywhere; half of them in the header
      bytes[below(i % 4 == 0 ? 8 + length : bytes.size())] = static_cast<char>(below(256));
      if (below(8) == 0) bytes.resize(below(bytes.size()));
    } else {  // a value of the document: another one's, another number, or other characters
      nlohmann::json changed = flat;
      nlohmann::json& value = changed[places[below(places.size())]];
      if (below(3) == 0) {
        value = flat[places[below(places.size())]];
      } else if (value.is_number()) {
        value = static_cast<int64_t>(below(9)) - 2;
      } else if (value.is_string() && !value.get<std::string>().empty()) {
        std::string text = value;
        text[below(text.size())] = "0123456789 %$=,:\n_az"[below(20)];
        value = text;
      } else {
        value = nullptr;
      }
      nlohmann::json document = changed.unflatten();
      const auto nodes = nlohmann::json::json_pointer("/plans/0/plan/graph/nodes");
      if (below(8) == 0 && document.contains(nodes)) document[nodes][below(document[nodes].size())][3] = nlohmann::json::array();
      bytes = sealed(document, content.at("checks"), header, tensors);
    }
    std::ofstream(copy, std::ios::binary | std::ios::trunc) << bytes;
    try {
      ai3::Model::load(copy).run(inputs);
    } catch (const std::exception&) {
      refused++;
    }
  }
  std::cout << refused << "\n";
}

}  // namespace

int main(int argc, char** argv) try {
  const std::vector<std::string> args(argv + 1, argv + argc);
  if (args.size() == 4 && args[0] == "run")
    run(args[1], read_tensors(args[2]), read_tensors(args[3]));
  else if (args.size() == 2 && args[0] == "refuse")
    ai3::Model::load(args[1]);
  else if (args.size() == 5 && args[0] == "mutate")
    mutate(args[1], read_tensors(args[2]), args[3], std::stoi(args[4]));
  else
    throw std::runtime_error("see the beginning of runner.cpp");
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << "\n";
  return 1;
}
