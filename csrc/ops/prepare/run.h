// Runs kernels, forward and backward, with their workspace.
#pragma once
#include <algorithm>

#include "../tensor/layout.h"
#include "../tensor/scratch.h"
#include "prepared.h"

namespace ai3::ops {

// Set by _C_cuda when it is loaded.
extern void* (*current_cuda_stream)(int32_t device);
extern bool (*is_cuda_capturing)(void* stream);

inline Where where_of(const Entry& entry, const Tensor& t) {
  const Device device = device_of(entry, t);
  return {device, device == Device::cuda ? t.get_device_index() : 0};
}

inline int32_t threads() { return static_cast<int32_t>(torch::stable::get_num_threads()); }
// Those that `work` multiplications are worth: waking another thread takes about as long as so many do.
inline int32_t threads(int64_t work) {
  constexpr int64_t each = int64_t{1} << 16;
  return work < each ? 1 : static_cast<int32_t>(std::min<int64_t>(threads(), work / each));
}

// The workspace of one call, and what was borrowed beyond it.
struct LentWorkspace : Workspace {
  LentWorkspace(char* memory, int64_t size, const Tensor& of_device)
      : Workspace{memory, size, 0, nullptr, lend}, like(of_device) {}
  static char* lend(Workspace& workspace, int64_t bytes);
  const Tensor& like;
  std::vector<Tensor> lent;
};

// Runs run(workspace) with `bytes` of scratch memory, the caller's where it gave some; `packed` of them are taken for the
// weights, the others the algorithm stated.
template <class Run>
void with_workspace(const Entry& entry, int64_t bytes, const Tensor& like, const Run& run, int64_t packed = 0,
                    const std::optional<Tensor>& given = std::nullopt) {
  check(bytes >= 0 && bytes < (int64_t{1} << 62), entry, "needs more workspace than can be addressed");
  if (given) check(given->numel() >= bytes, entry, "needs a workspace of ", bytes, " bytes, got ", given->numel());
  const bool cuda = like.is_cuda();
  const Scratch scratch(cuda || given ? 0 : bytes);
  LentWorkspace workspace(given ? static_cast<char*>(given->mutable_data_ptr()) : scratch.data(), bytes, like);
  std::optional<Tensor> memory;
  if (cuda) {
    if (bytes > 0 && !given)
      workspace.data = static_cast<char*>(memory.emplace(empty({bytes}, ScalarType::Byte, like)).mutable_data_ptr());
    workspace.stream = current_cuda_stream(like.get_device_index());
  }
  run(workspace);
  check(workspace.used <= bytes, entry, "states ", bytes - packed, " bytes of workspace and takes ", workspace.used - packed);
}

// What a caller gives beside the arguments.
struct Given {
  std::optional<Tensor> out = {}, workspace = {};
  Parameters parameters = {};  // of the algorithm's own
};

// Runs a kernel with its workspace; weights are packed first where the algorithm packs and `packed` is false. p is the prepared
// problem, with the tensors as they lie in memory.
template <class P>
void run_kernel(const Prepared<P>& prepared, const P& given, typename P::Operands operands, const Tensor& like,
                bool packed = false, const std::optional<Tensor>& memory = std::nullopt) {
  const P& p = prepared.chosen_by_rule ? with_parameters(given, prepared.problem.parameters) : given;
  std::optional<Prepared<P>> other;
  const Prepared<P>& call =
      same_layout(prepared.problem, p) ? prepared : other.emplace(relaid(prepared, where_of(*prepared.entry, like), p));
  const Algorithm<P>& algorithm = *call.algorithm;
  if (packed || !call.pack)
    return with_workspace(
        *call.entry, call.workspace, like, [&](Workspace& workspace) { algorithm.run(p, operands, workspace); }, 0, memory);
  if constexpr (HasWeight<P>) {
    const P direct = in_direct_call(algorithm.traits, p);
    with_workspace(
        *call.entry, checked_add(call.pack, call.workspace_beside_pack), like,
        [&](Workspace& workspace) {
          void* weights = workspace.take<char>(call.pack);
          const int64_t before = workspace.used;
          algorithm.traits.pack(direct, operands.weight, weights, workspace);
          workspace.used = before;
          operands.weight = weights;
          algorithm.run(direct, operands, workspace);
        },
        call.pack, memory);
  }
}
// Whether an algorithm has a kernel for a gradient (0: the input's, 1: the weight's): then it names itself for it.
template <class P>
bool has_backward(const Entry& entry, Device device, const P& p, size_t gradient) {
  const auto* algorithm = entry.algorithm<P>(device);
  if (!algorithm || !algorithm->traits.backward || !algorithm->traits.gradients) return false;
  Reason reason;
  if (!supported(algorithm->traits, p, reason)) return false;
  const GradientNames names = algorithm->traits.gradients(p);
  const char* name = gradient ? names.weight : names.input;
  return name && entry.name == name;
}
// Runs it; gradients that are absent are not wanted.
template <class P>
void run_backward(const Chosen<P>& chosen, const P& p, const typename P::Gradients& operands, const Tensor& like) {
  const Traits<P>& traits = chosen.algorithm->traits;
  check(traits.backward != nullptr, *chosen.entry, "has no kernel for gradients on this device");
  with_workspace(*chosen.entry, traits.backward_workspace ? traits.backward_workspace(p, operands) : 0, like,
                 [&](Workspace& workspace) { traits.backward(p, operands, workspace); });
}
template <class P>
void run_backward(const Chosen<P>& chosen, const P& p, const Tensor& grad, const Tensor& input, const Tensor& weight,
                  Tensor* grad_input, Tensor* grad_weight, Tensor* grad_bias) {
  auto written = [](Tensor* t) { return t ? t->mutable_data_ptr() : nullptr; };
  run_backward(chosen, p,
               {grad.const_data_ptr(), input.const_data_ptr(), weight.const_data_ptr(), written(grad_input), written(grad_weight),
                written(grad_bias)},
               input);
}

// run(x, y) on 4-D tensors as the algorithm wants them, p's strides set: one that reads a single layout gets copies in that
// layout, one that takes slices gets x as it is.
template <class P, class Run>
void run_dense(const Chosen<P>& chosen, P& p, void (*set_strides)(P&, bool channels_last), const Tensor& input, Tensor& output,
               bool channels_last, const Run& run) {
  const Layout layout = chosen.algorithm->traits.layout;
  const bool nhwc = layout == Layout::any ? channels_last : layout == Layout::nhwc;
  set_strides(p, nhwc);
  Strides4 slice;
  const bool sliced = chosen.algorithm->traits.sliced && !is_dense(input, nhwc) && slice_strides(input, nhwc, slice);
  if (sliced) p.x_stride = slice;
  const Tensor x = sliced ? input : dense(input, nhwc);
  if (nhwc == channels_last) return run(x, output);
  Tensor y = empty(sizes_of(output), output.scalar_type(), output, nhwc);
  run(x, y);
  torch::stable::copy_(output, y);
}

// Where a 4-D result is computed: in `out`, where that is given and the algorithm writes such memory, else in a tensor of its
// own.
struct Destination {
  Destination(const std::optional<Tensor>& out, bool slices, const Sizes& sizes, const Tensor& input, bool channels_last)
      : direct(out && (!out->is_cuda() || std::bit_cast<uintptr_t>(out->const_data_ptr()) % 16 == 0) &&
               (is_dense(*out, channels_last) || (slices && slice_strides(*out, channels_last, slice)))),
        tensor(direct ? *out : empty(sizes, input.scalar_type(), input, channels_last)) {}

  Strides4 slice{};  // of an `out` that has gaps
  bool direct;
  Tensor tensor;

  // The strides of y, to which the algorithm writes: run_dense may give it another one.
  void set_strides(const Tensor& y, Strides4& strides) const {
    if (direct && slice.n && y.const_data_ptr() == tensor.const_data_ptr()) strides = slice;
  }
  void copy_to(const std::optional<Tensor>& out) const {
    if (out && !direct) {
      Tensor to = *out;
      torch::stable::copy_(to, tensor);
    }
  }
};

// Not a rule.
template <class P>
bool is_method(const AlgorithmInfo& info) {
  return !reinterpret_cast<const Algorithm<P>&>(info).traits.choose;
}

// What computes the gradients of input and weight: PyTorch's own operators where null.
using GradientEntries = std::array<const Entry*, 2>;
// Gradients that an operator returns: an empty tensor of no elements where one was not asked for.
using Gradients = std::array<Tensor, 3>;
inline void give_gradients(StableIValue* stack, const Gradients& gradients) {
  for (int i = 0; i < 3; i++) give(stack, i, gradients[static_cast<size_t>(i)]);
}

}  // namespace ai3::ops
