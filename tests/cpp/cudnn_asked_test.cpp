// The real cuDNN, asked without a GPU what it would do on one: a device that a text describes is enough for its engines, their
// notes and their plans. What csrc/cuda takes for granted of it is held to its answers here. Methods by name, which only the old
// interface has, cannot be asked; plans that are compiled at run time are left out, since they need a driver.
#include <cudnn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "../../csrc/cuda/core/cudnn_plan.h"

namespace {

using namespace ai3;

struct Layer {
  int64_t n, c, size, k, kernel, stride, pad, dilation = 1, groups = 1;
};
enum class Type { f32, tf32, f16, bf16, f64 };

struct Engine {
  std::vector<cudnnBackendNumericalNote_t> numerical;
  int64_t workspace;
  bool has(cudnnBackendNumericalNote_t note) const { return std::ranges::count(numerical, note) > 0; }
  bool is_strict() const {  // multiplies float32 as float32
    return !has(CUDNN_NUMERICAL_NOTE_TENSOR_CORE) && !has(CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS);
  }
};

Described described(const std::string& device) {
  std::ifstream file(std::string(AI3_DEVICES) + "/" + device + ".json");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  Described properties(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
  properties.set(CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, static_cast<int64_t>(text.size()), text.data());
  properties.finalize();
  return properties;
}

Conv2dProblem problem(const Layer& l, Type type, bool nhwc, bool bias = false) {
  auto strides = [&](int64_t c, int64_t size) {
    return nhwc ? Strides4{c * size * size, 1, c * size, c} : Strides4{c * size * size, size * size, size, 1};
  };
  Conv2dProblem p{};
  p.dtype = type == Type::f16 ? DType::f16 : type == Type::bf16 ? DType::bf16 : type == Type::f64 ? DType::f64 : DType::f32;
  p.allow_tf32 = type == Type::tf32, p.has_bias = bias, p.groups = l.groups;
  p.batch = l.n, p.in_channels = l.c, p.in_height = p.in_width = l.size, p.out_channels = l.k;
  p.kernel_height = p.kernel_width = l.kernel, p.stride_h = p.stride_w = l.stride, p.pad_h = p.pad_w = l.pad;
  p.dilation_h = p.dilation_w = l.dilation;
  p.out_height = p.out_width = (l.size + 2 * l.pad - l.dilation * (l.kernel - 1) - 1) / l.stride + 1;
  p.x_stride = strides(l.c, l.size), p.y_stride = strides(l.k, p.out_height);
  return p;
}
// Those of a graph, by number.
std::map<int64_t, Engine> engines_of(Described& graph, const Described& properties) {
  std::map<int64_t, Engine> found;
  std::string words;
  graph.finalize();
  const int64_t count = graph.number(CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT);
  for (int64_t id = 0; id < count; id++) {
    Described engine(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    engine.set(CUDNN_ATTR_ENGINE_OPERATION_GRAPH, graph);
    engine.set(CUDNN_ATTR_ENGINE_GLOBAL_INDEX, {id});
    engine.set(CUDNN_ATTR_ENGINE_DEVICEPROP, properties);
    if (!engine.is_possible(words)) continue;
    const auto behavior = engine.notes<cudnnBackendBehaviorNote_t>(CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE, CUDNN_TYPE_BEHAVIOR_NOTE);
    if (std::ranges::count(behavior, CUDNN_BEHAVIOR_NOTE_RUNTIME_COMPILATION)) continue;
    Described configuration(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR), plan(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
    configuration.set(CUDNN_ATTR_ENGINECFG_ENGINE, engine);
    if (!configuration.is_possible(words)) continue;
    plan.set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configuration);
    plan.set(CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, properties);
    if (!plan.is_possible(words)) continue;
    found[id] = {engine.notes<cudnnBackendNumericalNote_t>(CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE),
                 plan.number(CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE)};
  }
  return found;
}
// The engines, by number, that compute a layer on a device, with images in NHWC or NCHW and filters in KRSC or KCRS.
std::map<int64_t, Engine> engines(const std::string& device, const Layer& l, Type type, bool nhwc, bool krsc) {
  const Described properties = described(device);
  std::map<int64_t, Engine> found;
  with_graph(problem(l, type, nhwc), GraphOf::output, 16, krsc, {nullptr, &properties},
             [&](Described& graph) { found = engines_of(graph, properties); });
  if (type == Type::f32) std::erase_if(found, [](const auto& e) { return !e.second.is_strict(); });
  return found;
}

constexpr const char* kDevices[] = {"a100", "l4", "h100", "rtx5090"};
constexpr Layer kMiddle = {10, 64, 56, 64, 3, 1, 1};
// Of networks, and with strides, dilation and groups.
constexpr Layer kLayers[] = {kMiddle,
                             {10, 3, 224, 64, 11, 4, 2},
                             {10, 64, 56, 256, 1, 1, 0},
                             {1, 5, 9, 3, 3, 2, 1},
                             {1, 64, 28, 64, 3, 1, 2, 2},
                             {1, 64, 28, 64, 3, 1, 1, 1, 4},
                             {1, 32, 28, 32, 3, 1, 1, 1, 32}};

TEST(CudnnAsked, StrictFloat32HasEnginesForLayersOfNetworks) {
  for (const char* device : kDevices)
    for (const Layer& l :
         {Layer{10, 3, 224, 64, 11, 4, 2}, Layer{10, 256, 14, 256, 3, 1, 1}, Layer{10, 64, 56, 256, 1, 1, 0}, kMiddle})
      EXPECT_FALSE(engines(device, l, Type::f32, false, false).empty())
          << device << ": " << l.c << " channels, kernel " << l.kernel;
}

// Why filters are packed as KRSC beside channels_last images (csrc/cuda/core/cudnn_plan.h): tensor cores then read images and
// filter where they lie, and of any other order a copy is made in every call. In TF32 only Hopper's do.
TEST(CudnnAsked, TensorCoresReadKrscFiltersWithoutACopy) {
  const int64_t elements = kMiddle.k * kMiddle.c * kMiddle.kernel * kMiddle.kernel;
  for (const std::string device : kDevices)
    for (Type type : {Type::tf32, Type::f16, Type::bf16}) {
      SCOPED_TRACE(device + ", type " + std::to_string(static_cast<int>(type)));
      const int64_t filter = elements * (type == Type::tf32 ? 4 : 2);
      const auto krsc = engines(device, kMiddle, type, true, true), kcrs = engines(device, kMiddle, type, true, false);
      int without_copy = 0;
      for (const auto& [id, engine] : krsc) {
        if (!engine.has(CUDNN_NUMERICAL_NOTE_TENSOR_CORE) || engine.workspace >= filter) continue;
        const auto other = kcrs.find(id);
        if (other != kcrs.end()) without_copy += other->second.workspace >= engine.workspace + filter;
      }
      EXPECT_EQ(without_copy > 0, type != Type::tf32 || device == "h100");
      for (const auto& [id, engine] : kcrs)
        EXPECT_TRUE(!engine.has(CUDNN_NUMERICAL_NOTE_TENSOR_CORE) || engine.workspace >= filter) << "engine " << id;
    }
}

// Strict float32 multiplies where images in NCHW lie, and copies those in NHWC whole.
TEST(CudnnAsked, StrictFloat32WantsNchw) {
  const int64_t image = kMiddle.n * kMiddle.c * kMiddle.size * kMiddle.size * 4;
  for (const char* device : kDevices) {
    const auto nchw = engines(device, kMiddle, Type::f32, false, false), nhwc = engines(device, kMiddle, Type::f32, true, false);
    ASSERT_TRUE(nchw.contains(1) && nhwc.contains(1)) << device;  // implicit GEMM with offsets computed first, alone
    EXPECT_LT(nchw.at(1).workspace, image / 100) << device;
    EXPECT_GE(nhwc.at(1).workspace, 2 * image) << device;
  }
}

// Which GPUs `winograd` may run on (docs/cuda.md).
TEST(CudnnAsked, WinogradIsForAmpereAndAdaAlone) {
  for (const char* device : kDevices) {
    const auto found = engines(device, kMiddle, Type::f32, false, false);
    const bool has = std::ranges::any_of(found, [](const auto& e) {
      return e.second.has(CUDNN_NUMERICAL_NOTE_WINOGRAD) || e.second.has(CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_4x4) ||
             e.second.has(CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_6x6) || e.second.has(CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_13x13);
    });
    EXPECT_EQ(has, std::string(device) == "a100" || std::string(device) == "l4") << device;
  }
}

TEST(CudnnAsked, NoEngineTransformsByFourier) {
  for (const char* device : kDevices)
    for (const auto& [id, engine] : engines(device, kMiddle, Type::f32, false, false))
      EXPECT_FALSE(engine.has(CUDNN_NUMERICAL_NOTE_FFT)) << device << ": engine " << id;
}

// What conv2d's `cudnn` runs (csrc/cuda/conv2d/cudnn.cpp), by its own code: a plan for whatever networks have, on each GPU, with
// and without a bias, which the same plan adds, of memory that begins at multiples of 16 bytes or of an element.
TEST(CudnnAsked, OurPlansComputeEveryLayerAsItIsAskedFor) {
  for (const char* device : kDevices) {
    const Described properties = described(device);
    for (const Layer& l : kLayers)
      for (Type type : {Type::f32, Type::tf32, Type::f16, Type::bf16, Type::f64})
        for (bool nhwc : {false, true})
          for (bool bias : {false, true})
            for (bool aligned : {false, true}) {
              const Conv2dProblem p = problem(l, type, nhwc, bias);
              SCOPED_TRACE(std::string(device) + ", " + std::to_string(l.c) + " channels, type " +
                           std::to_string(static_cast<int>(type)) + (nhwc ? ", NHWC" : ", NCHW"));
              const GraphPlan plan = graph_plan(p, GraphOf::output, aligned ? 16 : size_of(p.dtype), {nullptr, &properties});
              ASSERT_EQ(plan.refusal, "");
              const Described engine =
                  std::move(plan.configuration->others(CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_BACKEND_ENGINE_DESCRIPTOR).at(0));
              for (const auto note :
                   engine.notes<cudnnBackendNumericalNote_t>(CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE)) {
                const bool rounds = note == CUDNN_NUMERICAL_NOTE_TENSOR_CORE;
                EXPECT_TRUE(rounds ? type != Type::f32 : note == CUDNN_NUMERICAL_NOTE_STRICT_NAN_PROP) << "note " << note;
              }
            }
  }
}

// Residual, bias and relu in one plan: in this order, and only along with a bias, which is why `cudnn` gives one of zeros.
TEST(CudnnAsked, PlansAddAResidualAndApplyReluAlongWithABias) {
  for (const char* device : kDevices) {
    const Described properties = described(device);
    for (Type type : {Type::f32, Type::tf32, Type::f16, Type::bf16, Type::f64})
      for (bool nhwc : {false, true})
        for (int adds = 1; adds < 8; adds++) {
          const bool bias = adds & 1, residual = adds & 2, relu = adds & 4;
          Conv2dProblem p = problem(kMiddle, type, nhwc, bias);
          p.has_residual = residual, p.activation = relu ? Activation::relu : Activation::none;
          const GraphPlan plan = graph_plan(p, GraphOf::output, 16, {nullptr, &properties});
          EXPECT_EQ(plan.refusal.empty(), bias) << device << ", type " << static_cast<int>(type) << ", " << adds << plan.refusal;
        }
  }
}

// And the gradients of every layer (csrc/cuda/conv2d/cudnn.cpp).
TEST(CudnnAsked, OurPlansComputeBothGradientsOfEveryLayer) {
  for (const char* device : kDevices) {
    const Described properties = described(device);
    for (const Layer& l : kLayers)
      for (Type type : {Type::f32, Type::tf32, Type::f16, Type::bf16, Type::f64})
        for (bool nhwc : {false, true})
          for (GraphOf of : {GraphOf::input_gradient, GraphOf::weight_gradient}) {
            const Conv2dProblem p = problem(l, type, nhwc);
            const GraphPlan plan = graph_plan(p, of, size_of(p.dtype), {nullptr, &properties});
            EXPECT_EQ(plan.refusal, "") << device << ", " << l.c << " channels, type " << static_cast<int>(type) << nhwc;
          }
  }
}

// In the format of their type our plans multiply where images and filters lie, bias included.
TEST(CudnnAsked, OurPlansCopyNothingInTheFormatOfTheirType) {
  for (const std::string device : kDevices) {
    const Described properties = described(device);
    for (bool bias : {false, true})
      for (Type type : {Type::f32, Type::tf32, Type::f16, Type::bf16}) {
        if (type == Type::tf32 && device != "h100") continue;
        const GraphPlan plan =
            graph_plan(problem(kMiddle, type, type != Type::f32, bias), GraphOf::output, 16, {nullptr, &properties});
        EXPECT_LT(plan.workspace, kMiddle.k * kMiddle.c * kMiddle.kernel * kMiddle.kernel * 2)
            << device << ", type " << static_cast<int>(type) << bias;
      }
  }
}

}  // namespace
