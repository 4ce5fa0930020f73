// Loads a network that ai3_ops.save wrote and runs it on an input of ones: its first outputs, and milliseconds a call.
//
//   run_model model.ai3 1 3 224 224
#include <ai3_ops/model.h>

#include <algorithm>
#include <chrono>
#include <iostream>

int main(int argc, char** argv) try {
  if (argc < 3) throw std::runtime_error("usage: run_model <file> <sizes of the input>...");
  std::vector<int64_t> sizes;
  for (int i = 2; i < argc; i++) sizes.push_back(std::stoll(argv[i]));
  const ai3::Model model = ai3::Model::load(argv[1]);
  const at::Tensor input = at::ones(sizes);
  std::vector<double> times;
  std::vector<at::Tensor> outputs;
  for (int i = 0; i < 20; i++) {
    const auto start = std::chrono::steady_clock::now();
    outputs = model.run({input});
    times.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
  }
  for (const at::Tensor& output : outputs) std::cout << output.sizes() << " " << output.flatten().slice(0, 0, 4) << "\n";
  std::sort(times.begin(), times.end());
  std::cout << "milliseconds: " << times[times.size() / 2] << "\n";
} catch (const std::exception& error) {
  std::cerr << error.what() << "\n";
  return 1;
}
