// cuDNN's own choice among its engines, by its graph interface: the first of its heuristic's that computes as the call asks for,
// convolution and bias in one plan.
#include "../core/cudnn.cuh"

#include "../../algos/conv2d/delegated.h"
#include "../core/cudnn_handle.h"

namespace ai3::inline AI3_LEVEL {
namespace {

// What a plan may take for granted of the tensors' memory: that it begins at multiples of 16 bytes, as whatever is not a slice
// does, or at those of an element.
constexpr int64_t kAligned = 16;
int64_t alignment_of(const Conv2dProblem& p, const Conv2dOperands& m) {
  uintptr_t bits = 0;
  for (const Operand& operand : {m.input, m.weight, m.bias, m.output}) bits |= reinterpret_cast<uintptr_t>(operand.data);
  return bits % kAligned == 0 ? kAligned : size_of(p.dtype);
}

// This thread's plan of a problem, kept or made. What is made while a stream is captured is no part of the graph.
const GraphPlan& plan_of(const Conv2dProblem& p, int64_t alignment) {
  constexpr size_t kPlans = 1024;
  CudnnHandle& on = cudnn_handle();
  const CudnnKey key = cudnn_key(p, 2 * alignment + p.has_bias, on.device);
  if (const auto found = on.plans.find(key); found != on.plans.end()) return found->second;
  if (on.plans.size() >= kPlans) on.plans.clear();
  if (std::string refusal = too_large_for_cudnn(key); !refusal.empty())
    return on.plans.emplace(key, GraphPlan{.refusal = std::move(refusal)}).first->second;
  const RelaxedCapture relaxed;
  return on.plans.emplace(key, graph_plan(p, alignment, {on.handle})).first->second;
}

bool supports(const Conv2dProblem& p, Reason& reason) {
  if (!device_supports(p, reason)) return false;
  if (current_capability() == 0 || p.batch == 0 || !sizes_known(p)) return true;
  const GraphPlan& plan = plan_of(p, kAligned);
  return plan.refusal.empty() || refuse(reason, "%s", plan.refusal.c_str());
}

// Where tensors lie is known only when the plan runs.
int64_t workspace(const Conv2dProblem& p) {
  if (p.batch == 0) return 0;
  const int64_t aligned = plan_of(p, kAligned).workspace, other = plan_of(p, size_of(p.dtype)).workspace;
  return piece_bytes<char>(aligned < other ? other : aligned);
}

void run(const Conv2dProblem& p, const Conv2dOperands& m, Workspace& workspace) {
  const GraphPlan& plan = plan_of(p, alignment_of(p, m));
  if (!plan.refusal.empty()) throw std::runtime_error(plan.refusal);
  const cudnnHandle_t handle = cudnn_handle().handle;
  check_cudnn(cudnnSetStream(handle, stream_of(workspace)), "cudnnSetStream");
  void* const scratch = plan.workspace ? take<char>(workspace, plan.workspace) : nullptr;
  void* const tensors[] = {m.input.data, m.weight.data, m.output.data, m.bias.data};
  Described call(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  if (p.has_bias)
    call.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, {kX, kW, kY, kB});
  else
    call.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, {kX, kW, kY});
  call.set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, p.has_bias ? 4 : 3, tensors);
  call.set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &scratch);
  call.finalize();
  check_cudnn(cudnnBackendExecute(handle, *plan.plan, call), "cudnnBackendExecute");
}

AI3_REGISTER_(conv2d, cudnn, run, .supports = supports, .workspace = workspace, .packed_bytes = cudnn_packed_bytes,
              .pack = cudnn_pack, .gradients = gradients_by_im2col)

}  // namespace

const Algorithm<Conv2dProblem>& conv2d_cudnn_record() { return conv2d_cudnn_algorithm; }

}  // namespace ai3::inline AI3_LEVEL
