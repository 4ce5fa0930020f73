// cuDNN's own choice among its engines, by its graph interface: the first of its heuristic's that computes as the call asks for.
// Convolution, residual, bias and relu are one plan, and so is each gradient.
#include "../core/cudnn.cuh"

#include "../../algos/conv2d/delegated.h"
#include "../core/cudnn_handle.h"

namespace ai3::inline AI3_LEVEL {
namespace {

// What a plan may take for granted of the tensors' memory: that it begins at multiples of 16 bytes, as whatever is not a slice
// does, or at those of an element.
constexpr int64_t kAligned = 16;
int64_t alignment_of(const Conv2dProblem& p, std::initializer_list<const void*> tensors) {
  uintptr_t bits = 0;
  for (const void* tensor : tensors) bits |= reinterpret_cast<uintptr_t>(tensor);
  return bits % kAligned == 0 ? kAligned : size_of(p.dtype);
}

// Precompiled engines add a residual and apply relu where they add a bias: one of zeros where the call has none.
bool adds_zeros(const Conv2dProblem& p) { return !p.has_bias && (p.has_residual || p.activation != Activation::none); }
int64_t outputs_of(const Conv2dProblem& p) { return checked_product({p.batch, p.out_channels, p.out_height, p.out_width}); }

// This thread's plan of a problem, kept or made. What is made while a stream is captured is no part of the graph.
const GraphPlan& plan_of(const Conv2dProblem& problem, GraphOf of, int64_t alignment) {
  constexpr size_t kPlans = 1024;
  CudnnHandle& on = cudnn_handle();
  Conv2dProblem p = problem;
  p.has_bias |= adds_zeros(p);
  int64_t how = alignment * 4 + static_cast<int64_t>(of);
  for (const bool added : {p.has_bias, p.has_residual, p.activation != Activation::none})
    how = 2 * how + (of == GraphOf::output && added);
  const CudnnKey key = cudnn_key(p, how, on.device);
  if (const auto found = on.plans.find(key); found != on.plans.end()) return found->second;
  if (on.plans.size() >= kPlans) on.plans.clear();
  if (std::string refusal = too_large_for_cudnn(key); !refusal.empty())
    return on.plans.emplace(key, GraphPlan{.refusal = std::move(refusal)}).first->second;
  const RelaxedCapture relaxed;
  return on.plans.emplace(key, graph_plan(p, of, alignment, {on.handle})).first->second;
}
bool has_plan(const Conv2dProblem& p, GraphOf of) {
  return current_capability() == 0 || p.batch == 0 || !sizes_known(p) || plan_of(p, of, kAligned).refusal.empty();
}
// Where tensors lie is known only when the plan runs.
int64_t plan_workspace(const Conv2dProblem& p, GraphOf of) {
  const int64_t aligned = plan_of(p, of, kAligned).workspace, other = plan_of(p, of, size_of(p.dtype)).workspace;
  return piece_bytes<char>(aligned < other ? other : aligned);
}

bool supports(const Conv2dProblem& p, Reason& reason) {
  if (!device_supports(p, reason)) return false;
  return has_plan(p, GraphOf::output) || refuse(reason, "%s", plan_of(p, GraphOf::output, kAligned).refusal.c_str());
}

// A plan, with the memory of the tensors that it has.
struct GivenTensor {
  GraphTensor id;
  void* data;
};
void run_plan(const GraphPlan& plan, std::initializer_list<GivenTensor> tensors, Workspace& workspace) {
  if (!plan.refusal.empty()) throw std::runtime_error(plan.refusal);
  const cudnnHandle_t handle = cudnn_handle().handle;
  check_cudnn(cudnnSetStream(handle, stream_of(workspace)), "cudnnSetStream");
  void* const scratch = plan.workspace ? take<char>(workspace, plan.workspace) : nullptr;
  int64_t ids[kSums] = {}, count = 0;
  void* places[kSums] = {};
  for (const GivenTensor& t : tensors)
    if (t.data) ids[count] = t.id, places[count++] = t.data;
  Described call(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  call.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, count, ids);
  call.set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, count, places);
  call.set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &scratch);
  call.finalize();
  check_cudnn(cudnnBackendExecute(handle, *plan.plan, call), "cudnnBackendExecute");
}

int64_t workspace(const Conv2dProblem& p) {
  if (p.batch == 0) return 0;
  int64_t bytes = plan_workspace(p, GraphOf::output);
  if (adds_zeros(p)) bytes = checked_add(bytes, piece_bytes<char>(checked_mul(p.out_channels, size_of(p.dtype))));
  if (p.has_residual) bytes = checked_add(bytes, piece_bytes<char>(checked_mul(outputs_of(p), size_of(p.dtype))));
  return bytes;
}
void run(const Conv2dProblem& p, const Conv2dOperands& m, Workspace& workspace) {
  const cudaStream_t stream = stream_of(workspace);
  void *bias = p.has_bias ? m.bias.data : nullptr, *residual = p.has_residual ? m.residual.data : nullptr;
  if (adds_zeros(p)) {
    const int64_t bytes = checked_mul(p.out_channels, size_of(p.dtype));
    bias = take<char>(workspace, bytes);
    check_cuda(cudaMemsetAsync(bias, 0, static_cast<size_t>(bytes), stream), "cudaMemsetAsync");
  }
  if (residual && residual == m.output.data) {  // no engine promises to have read it before it writes
    const int64_t bytes = checked_mul(outputs_of(p), size_of(p.dtype));
    residual = take<char>(workspace, bytes);
    check_cuda(cudaMemcpyAsync(residual, m.residual.data, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream),
               "cudaMemcpyAsync");
  }
  const int64_t alignment = alignment_of(p, {m.input.data, m.weight.data, bias, residual, m.output.data});
  run_plan(plan_of(p, GraphOf::output, alignment),
           {{kX, m.input.data}, {kW, m.weight.data}, {kB, bias}, {kResidual, residual}, {kY, m.output.data}}, workspace);
}

// Gradients ----------------------------------------------------------------------------------------------------------------
GradientNames gradients(const Conv2dProblem& p) {
  auto by = [&](GraphOf of) { return has_plan(p, of) ? "cudnn" : "im2col"; };
  return {by(GraphOf::input_gradient), by(GraphOf::weight_gradient)};
}
// Weights, and their gradient, are KCRS: beside a plan that has KRSC they are rearranged.
int64_t krsc_bytes(const Conv2dProblem& p) { return piece_bytes<char>(cudnn_packed_bytes(p)); }
int64_t backward_workspace(const Conv2dProblem& p, const WeightedGradients& m) {
  int64_t bytes = m.grad_bias ? cudnn_sum_bias_bytes(p) : 0;
  auto add = [&](GraphOf of) { bytes = checked_add(bytes, checked_add(plan_workspace(p, of), krsc_bytes(p))); };
  if (m.grad_input) add(GraphOf::input_gradient);
  if (m.grad_weight) add(GraphOf::weight_gradient);
  return bytes;
}
void backward(const Conv2dProblem& p, const WeightedGradients& m, Workspace& workspace) {
  const int64_t krsc = krsc_bytes(p);
  if (m.grad_input) {
    Operand weight = m.weight;
    if (krsc) weight = take<char>(workspace, krsc), cudnn_pack(p, m.weight, weight, workspace);
    const int64_t alignment = alignment_of(p, {m.grad_output.data, weight.data, m.grad_input.data});
    run_plan(plan_of(p, GraphOf::input_gradient, alignment),
             {{kX, m.grad_input.data}, {kW, weight.data}, {kY, m.grad_output.data}}, workspace);
  }
  if (m.grad_weight) {
    Operand gradient = m.grad_weight;
    if (krsc) gradient = take<char>(workspace, krsc);
    const int64_t alignment = alignment_of(p, {m.grad_output.data, m.input.data, gradient.data});
    run_plan(plan_of(p, GraphOf::weight_gradient, alignment), {{kX, m.input.data}, {kW, gradient.data}, {kY, m.grad_output.data}},
             workspace);
    if (krsc) cudnn_unpack(p, gradient, m.grad_weight, workspace);
  }
  if (m.grad_bias) cudnn_sum_bias(p, m.grad_output, m.grad_bias, workspace);
}

AI3_REGISTER_(conv2d, cudnn, run, .epilogue = true, .activations = activation_bit(Activation::relu), .supports = supports,
              .workspace = workspace, .packed_bytes = cudnn_packed_bytes, .pack = cudnn_pack, .gradients = gradients,
              .backward = backward, .backward_workspace = backward_workspace)

}  // namespace

const Algorithm<Conv2dProblem>& conv2d_cudnn_record() { return conv2d_cudnn_algorithm; }

}  // namespace ai3::inline AI3_LEVEL
