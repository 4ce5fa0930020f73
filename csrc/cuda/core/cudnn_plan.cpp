#include "cudnn_plan.h"

namespace ai3::inline AI3_LEVEL {
namespace {

using Four = std::initializer_list<int64_t>;

Described tensor(int64_t id, cudnnDataType_t type, Four sizes, Four strides, int64_t alignment) {
  Described t(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  t.set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
  t.set(CUDNN_ATTR_TENSOR_DIMENSIONS, sizes);
  t.set(CUDNN_ATTR_TENSOR_STRIDES, strides);
  t.set(CUDNN_ATTR_TENSOR_UNIQUE_ID, {id});
  t.set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, {alignment});
  const bool is_virtual = id >= kSums;
  t.set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &is_virtual);
  t.finalize();
  return t;
}

Described convolution_of(const Conv2dProblem& p, cudnnDataType_t sums_type) {
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
  return convolution;
}

// The names that an operation's tensors and factors go by.
struct ProductNames {
  cudnnBackendDescriptorType_t type;
  cudnnBackendAttributeName_t x, w, y, convolution, alpha, beta;
};
constexpr ProductNames names_of(GraphOf of) {
  switch (of) {
    case GraphOf::output:
      return {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA};
    case GraphOf::input_gradient:
      return {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA};
    default:
      return {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA};
  }
}

// to = mode(from), or mode(from, with).
Described pointwise(cudnnPointwiseMode_t mode, cudnnDataType_t type, const Described& from, const Described* with,
                    const Described& to) {
  Described how(CUDNN_BACKEND_POINTWISE_DESCRIPTOR), operation(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
  how.set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode);
  how.set(CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, &type);
  if (mode == CUDNN_POINTWISE_RELU_FWD) {  // NaN stays NaN, as in ATen; cuDNN has no other way to say it
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
    const cudnnNanPropagation_t nan = CUDNN_PROPAGATE_NAN;
    how.set(CUDNN_ATTR_POINTWISE_NAN_PROPAGATION, CUDNN_TYPE_NAN_PROPOGATION, 1, &nan);
#pragma GCC diagnostic pop
  }
  how.finalize();
  operation.set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, how);
  operation.set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, from);
  if (with) operation.set(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, *with);
  operation.set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, to);
  operation.finalize();
  return operation;
}

}  // namespace

void with_graph(const Conv2dProblem& p, GraphOf of, int64_t alignment, bool krsc, const GraphDevice& on,
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
  const Described residual = tensor(kResidual, type, outputs, output_strides, alignment);
  const Described b = tensor(kB, type, {1, p.out_channels, 1, 1}, {p.out_channels, 1, 1, 1}, alignment);

  struct Step {
    cudnnPointwiseMode_t mode;
    const Described* with;
  };
  std::vector<Step> steps;
  if (of == GraphOf::output) {
    if (p.has_residual) steps.push_back({CUDNN_POINTWISE_ADD, &residual});
    if (p.has_bias) steps.push_back({CUDNN_POINTWISE_ADD, &b});
    if (p.activation == Activation::relu) steps.push_back({CUDNN_POINTWISE_RELU_FWD, nullptr});
  }
  std::vector<Described> sums;  // between one operation and the next
  for (size_t i = 0; i < steps.size(); i++)
    sums.push_back(tensor(kSums + static_cast<int64_t>(i), sums_type, outputs, output_strides, 16));

  const Described convolution = convolution_of(p, sums_type);
  const ProductNames names = names_of(of);
  Described products(names.type);
  auto factor = [&](cudnnBackendAttributeName_t name, float value) {
    const double wide = value;
    if (p.dtype == DType::f64)
      products.set(name, CUDNN_TYPE_DOUBLE, 1, &wide);
    else
      products.set(name, CUDNN_TYPE_FLOAT, 1, &value);
  };
  products.set(names.x, x);
  products.set(names.w, w);
  products.set(names.y, sums.empty() ? y : sums[0]);
  products.set(names.convolution, convolution);
  factor(names.alpha, 1);
  factor(names.beta, 0);
  products.finalize();

  std::vector<Described> others;
  std::vector<cudnnBackendDescriptor_t> operations = {products};
  for (size_t i = 0; i < steps.size(); i++)
    operations.push_back(
        others.emplace_back(pointwise(steps[i].mode, sums_type, sums[i], steps[i].with, i + 1 < sums.size() ? sums[i + 1] : y)));
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

GraphPlan graph_plan(const Conv2dProblem& p, GraphOf of, int64_t alignment, const GraphDevice& on) {
  GraphPlan found;
  found.refusal = "has no precompiled engine of cuDNN's that computes this as it is asked for";
  with_graph(p, of, alignment, reads_krsc(p), on, [&](Described& graph) {
    if (graph.is_possible(found.refusal)) find_plan(p, graph, on, found);
  });
  return found;
}

}  // namespace ai3::inline AI3_LEVEL
