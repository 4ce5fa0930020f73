// What test programs without Python share.
#pragma once
#include <ATen/ATen.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

// A tensor, or a tuple or list of some, as torch.save writes them.
inline std::vector<at::Tensor> read_tensors(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("cannot read " + path);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  const c10::IValue value = torch::jit::pickle_load(bytes);
  if (value.isTensor()) return {value.toTensor()};
  std::vector<at::Tensor> tensors;
  if (value.isTuple())
    for (const c10::IValue& v : value.toTupleRef().elements()) tensors.push_back(v.toTensor());
  else
    for (const c10::IValue& v : value.toListRef()) tensors.push_back(v.toTensor());
  return tensors;
}

// Whether a library of Python's is in the process.
inline bool has_python() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);)
    if (line.find("libpython") != std::string::npos || line.find("libtorch_python") != std::string::npos) return true;
  return false;
}
