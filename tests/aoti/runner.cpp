// Runs an AOTInductor package that calls ai3 operators, in a process without Python:
//
//   aoti_runner <package.pt2> <inputs.pt> <expected.pt> <library.so>...
//
// The libraries (ai3_ops/_C.so and, for CUDA models, _C_cuda.so) define the operators; the .pt files hold a tensor or a tuple of
// tensors as torch.save writes them. Exit code 0: every output is equal to the expected one within 1e-4 (1e-2 in half precision)
// of its largest magnitude.
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <iostream>

#include "../without_python.h"

namespace {

int run(int argc, char** argv) {
  if (argc < 5) throw std::runtime_error("usage: aoti_runner package.pt2 inputs.pt expected.pt library.so...");
  for (int i = 4; i < argc; i++)
    if (!dlopen(argv[i], RTLD_NOW | RTLD_GLOBAL)) throw std::runtime_error(dlerror());
  torch::inductor::AOTIModelPackageLoader loader(argv[1]);
  const std::vector<at::Tensor> expected = read_tensors(argv[3]), outputs = loader.run(read_tensors(argv[2]));
  if (has_python()) throw std::runtime_error("a Python library is loaded");
  if (outputs.size() != expected.size())
    throw std::runtime_error("got " + std::to_string(outputs.size()) + " outputs, expected " + std::to_string(expected.size()));
  for (size_t i = 0; i < outputs.size(); i++) {
    const double scale = expected[i].to(at::kDouble).abs().max().item<double>();
    const double error = (outputs[i].to(at::kDouble) - expected[i].to(at::kDouble)).abs().max().item<double>();
    const double bound = (expected[i].element_size() == 2 ? 1e-2 : 1e-4) * (scale > 0 ? scale : 1);
    std::cout << "output " << i << ": largest error " << error << " of " << scale << "\n";
    if (!(error <= bound)) return 1;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) try { return run(argc, argv); } catch (const std::exception& e) {
  std::cerr << "aoti_runner: " << e.what() << "\n";
  return 2;
}
