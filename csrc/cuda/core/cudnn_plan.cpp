#include "cudnn_plan.h"

namespace ai3::inline AI3_LEVEL {
namespace {

using Four = std::initializer_list<int64_t>;

Described tensor(GraphTensor id, cudnnDataType_t type, Four sizes, Four strides, int64_t alignment) {
  Described t(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  t.set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
  t.set(CUDNN_ATTR_TENSOR_DIMENSIONS, sizes);
  t.set(CUDNN_ATTR_TENSOR_STRIDES, strides);
  t.set(CUDNN_ATTR_TENSOR_UNIQUE_ID, {id});
  t.set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, {alignment});
  const bool is_virtual = id == kSums;
  t.set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &is_virtual);
  t.finalize();
  return t;
}

}  // namespace

void with_graph(const Conv2dProblem& p, int64_t alignment, bool krsc, const GraphDevice& on,
                const std::function<void(Described&)>& use) {
  const cudnnDataType_t type = cudnn_type(p.dtype), sums_type = p.dtype == DType::f64 ? CUDNN_DATA_DOUBLE : CUDNN_DATA_FLOAT;
  const int64_t channels = p.in_channels / p.groups, r = p.kernel_height, s = p.kernel_width;
  const Four outputs = {p.batch, p.out_channels, p.out_height, p.out_width};
  const Four output_strides = {p.y_stride.n, p.y_stride.c, p.y_stride.h, p.y_stride.w};
  const Described x = tensor(kX, type, {p.batch, p.in_channels, p.in_height, p.in_width},
                             {p.x_stride.n, p.x_stride.c, p.x_stride.h, p.x_stride.w}, alignment);
  const Four as_krsc = {channels * r * s, 1, s * channels, channels}, as_kcrs = {channels * r * s, r * s, s, 1};
  const Described w = tensor(kW, type, {p.out_channels, channels, r, s}, krsc ? as_krsc : as_kcrs, alignment);
  const Described y = tensor(kY, type, outputs, output_strides, alignment);
  const Described sums = tensor(kSums, sums_type, outputs, output_strides, 16);

  Described convolution(CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);  // groups follow from the channels of x and w
  const cudnnConvolutionMode_t mode = CUDNN_CROSS_CORRELATION;
  convolution.set(CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, {2});
  convolution.set(CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &sums_type);
  convolution.set(CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, 1, &mode);
  convolution.set(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, {p.pad_h, p.pad_w});
  convolution.set(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, {p.pad_h, p.pad_w});
  convolution.set(CUDNN_ATTR_CONVOLUTION_DILATIONS, {p.dilation_h, p.dilation_w});
  convolution.set(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, {p.stride_h, p.stride_w});
  convolution.finalize();
  Described products(CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR);
  auto factor = [&](cudnnBackendAttributeName_t name, float value) {
    const double wide = value;
    if (p.dtype == DType::f64)
      products.set(name, CUDNN_TYPE_DOUBLE, 1, &wide);
    else
      products.set(name, CUDNN_TYPE_FLOAT, 1, &value);
  };
  products.set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X, x);
  products.set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W, w);
  products.set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y, p.has_bias ? sums : y);
  products.set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC, convolution);
  factor(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA, 1);
  factor(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA, 0);
  products.finalize();

  std::vector<cudnnBackendDescriptor_t> operations = {products};
  Described addition(CUDNN_BACKEND_POINTWISE_DESCRIPTOR), added(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
  const Described b = tensor(kB, type, {1, p.out_channels, 1, 1}, {p.out_channels, 1, 1, 1}, alignment);
  if (p.has_bias) {
    const cudnnPointwiseMode_t add = CUDNN_POINTWISE_ADD;
    addition.set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &add);
    addition.set(CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, &sums_type);
    addition.finalize();
    added.set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, addition);
    added.set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, sums);
    added.set(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b);
    added.set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
    added.finalize();
    operations.push_back(added);
  }
  Described graph(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  graph.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, static_cast<int64_t>(operations.size()),
            operations.data());
  if (!on.properties) graph.set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &on.handle);
  use(graph);
}

namespace {

// Whether an engine multiplies and adds as p asks for. An engine that is compiled at run time is left out: that takes a second in
// the first call of each problem, needs libraries that PyTorch may lack, and cannot be asked about without a GPU.
bool fits(const Conv2dProblem& p, const Described& engine) {
  for (const auto note : engine.notes<cudnnBackendBehaviorNote_t>(CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE, CUDNN_TYPE_BEHAVIOR_NOTE))
    if (note == CUDNN_BEHAVIOR_NOTE_RUNTIME_COMPILATION) return false;
  for (const auto note : engine.notes<cudnnBackendNumericalNote_t>(CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE))
    switch (note) {
      case CUDNN_NUMERICAL_NOTE_TENSOR_CORE:  // which multiply 16 bits exactly, and round float32 to TF32
        if (p.dtype == DType::f32 && !p.allow_tf32) return false;
        break;
      case CUDNN_NUMERICAL_NOTE_STRICT_NAN_PROP: break;
      default: return false;  // inputs or sums of fewer bits, sums in any order, transforms, and what nobody knows yet
    }
  return true;
}

// The first configuration that fits and has a plan.
void find_plan(const Conv2dProblem& p, const Described& graph, const GraphDevice& on, GraphPlan& found) {
  for (const cudnnBackendHeurMode_t mode : {CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK}) {
    Described heuristic(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    heuristic.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
    heuristic.set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
    if (on.properties) heuristic.set(CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, *on.properties);
    if (!heuristic.is_possible(found.refusal)) continue;
    for (Described& configuration : heuristic.others(CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR)) {
      if (!fits(p, configuration.others(CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_BACKEND_ENGINE_DESCRIPTOR).at(0))) continue;
      Described plan(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
      plan.set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configuration);
      if (on.properties)
        plan.set(CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, *on.properties);
      else
        plan.set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &on.handle);
      if (!plan.is_possible(found.refusal)) continue;
      found.workspace = plan.number(CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE);
      found.configuration.emplace(std::move(configuration)), found.plan.emplace(std::move(plan));
      return found.refusal.clear();
    }
  }
}

}  // namespace

GraphPlan graph_plan(const Conv2dProblem& p, int64_t alignment, const GraphDevice& on) {
  GraphPlan found;
  found.refusal = "has no precompiled engine of cuDNN's that computes this as it is asked for";
  with_graph(p, alignment, reads_krsc(p), on, [&](Described& graph) {
    if (graph.is_possible(found.refusal)) find_plan(p, graph, on, found);
  });
  return found;
}

}  // namespace ai3::inline AI3_LEVEL
