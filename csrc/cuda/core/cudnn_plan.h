// A convolution by cuDNN's graph interface: operations on described tensors, for all of which together cuDNN's heuristic names
// engines, those first that it expects to be fastest. Engines are known by what they say of themselves (their notes), since their
// numbers change with the operations and the version.
#pragma once
#include <functional>
#include <optional>

#include "../../algos/conv2d/problem.h"
#include "cudnn_described.h"

namespace ai3::inline AI3_LEVEL {

// What a graph computes: the output, with what a problem adds to it and applies to it; or the gradient of the input or of the
// weight, in the memory that `kX` or `kW` stands for, of the output's in `kY`.
enum class GraphOf { output, input_gradient, weight_gradient };

// The tensors of such a graph, by the numbers that a call gives their memory under. From kSums on they have none.
enum GraphTensor : int64_t { kX = 1, kW, kB, kY, kResidual, kSums };

struct GraphPlan {
  std::optional<Described> configuration = {}, plan = {};
  int64_t workspace = 0;
  std::string refusal;  // empty: there is a plan
};

// Whom a plan is for: a thread's handle or, in tests, a device that is described.
struct GraphDevice {
  cudnnHandle_t handle;
  const Described* properties = nullptr;
};

// Beside channels_last images tensor cores read filters as KRSC alone: cuDNN would rearrange any other in every call.
inline bool reads_krsc(const Conv2dProblem& p) {
  const bool tensor_cores = size_of(p.dtype) == 2 || (p.dtype == DType::f32 && p.allow_tf32);
  return tensor_cores && p.x_stride.c == 1 && p.y_stride.c == 1;
}

// use(graph) of p's graph, which is described and not yet finalized, and no longer there afterwards: x * w and, where p has them,
// operations that add residual and bias to the sums, in this order, and apply relu, before they are rounded and stored: cuDNN has
// precompiled engines for these operations in this order alone.
void with_graph(const Conv2dProblem& p, GraphOf of, int64_t alignment, bool krsc, const GraphDevice& on,
                const std::function<void(Described&)>& use);

// The first plan of the heuristic's that computes as p asks for, of tensors that lie at multiples of `alignment` bytes. Throws
// std::runtime_error where the answer says that cuDNN was asked wrongly or is not in order.
GraphPlan graph_plan(const Conv2dProblem& p, GraphOf of, int64_t alignment, const GraphDevice& on);

}  // namespace ai3::inline AI3_LEVEL
