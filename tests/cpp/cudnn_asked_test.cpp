// The real cuDNN, asked without a GPU what it would do on one: a device that a text describes is enough for its engines, their
// notes and their plans. What csrc/cuda takes for granted of it is held to its answers here. Methods by name, which only the old
// interface has, cannot be asked; plans that are compiled at run time are left out, since they need a driver.
#include <cudnn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

void check(cudnnStatus_t status, const char* what) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  char words[512] = "";
  cudnnGetLastErrorString(words, sizeof(words));
  throw std::runtime_error(std::string(what) + ": " + cudnnGetErrorString(status) + ": " + words);
}

// A descriptor of cuDNN's graph interface.
class Described {
 public:
  explicit Described(cudnnBackendDescriptorType_t type) {
    check(cudnnBackendCreateDescriptor(type, &descriptor_), "cudnnBackendCreateDescriptor");
  }
  ~Described() { cudnnBackendDestroyDescriptor(descriptor_); }
  Described(const Described&) = delete;
  Described& operator=(const Described&) = delete;

  void set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t count, const void* values) {
    check(cudnnBackendSetAttribute(descriptor_, name, type, count, values), "cudnnBackendSetAttribute");
  }
  void set(cudnnBackendAttributeName_t name, const std::vector<int64_t>& values) {
    set(name, CUDNN_TYPE_INT64, static_cast<int64_t>(values.size()), values.data());
  }
  void set(cudnnBackendAttributeName_t name, const Described& other) {
    set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &other.descriptor_);
  }
  void finalize() { check(cudnnBackendFinalize(descriptor_), "cudnnBackendFinalize"); }
  bool is_possible() { return cudnnBackendFinalize(descriptor_) == CUDNN_STATUS_SUCCESS; }
  int64_t number(cudnnBackendAttributeName_t name) const {
    int64_t count = 0, value = 0;
    check(cudnnBackendGetAttribute(descriptor_, name, CUDNN_TYPE_INT64, 1, &count, &value), "cudnnBackendGetAttribute");
    return value;
  }
  template <class Note>
  std::vector<Note> notes(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type) const {
    std::array<Note, 32> all;
    int64_t count = 0;
    check(cudnnBackendGetAttribute(descriptor_, name, type, all.size(), &count, all.data()), "cudnnBackendGetAttribute");
    return {all.begin(), all.begin() + count};
  }

 private:
  cudnnBackendDescriptor_t descriptor_ = nullptr;
};

struct Layer {
  int64_t n, c, size, k, kernel, stride, pad;
};
enum class Type { f32, tf32, f16, bf16 };

struct Engine {
  std::vector<cudnnBackendNumericalNote_t> numerical;
  int64_t workspace;
  bool has(cudnnBackendNumericalNote_t note) const { return std::ranges::count(numerical, note) > 0; }
  bool is_strict() const {  // multiplies float32 as float32
    return !has(CUDNN_NUMERICAL_NOTE_TENSOR_CORE) && !has(CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS);
  }
};

// The engines, by number, that compute a layer on a device, with images in NHWC or NCHW and filters in KRSC or KCRS.
std::map<int64_t, Engine> engines(const std::string& device, const Layer& l, Type type, bool nhwc, bool krsc) {
  std::ifstream file(std::string(AI3_DEVICES) + "/" + device + ".json");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  Described properties(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
  properties.set(CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, static_cast<int64_t>(text.size()), text.data());
  properties.finalize();

  const cudnnDataType_t data = type == Type::f16 ? CUDNN_DATA_HALF : type == Type::bf16 ? CUDNN_DATA_BFLOAT16 : CUDNN_DATA_FLOAT;
  auto tensor = [&](int64_t id, const std::array<int64_t, 4>& s, bool channels_last) {
    auto t = std::make_unique<Described>(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    t->set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &data);
    t->set(CUDNN_ATTR_TENSOR_DIMENSIONS, {s.begin(), s.end()});
    t->set(CUDNN_ATTR_TENSOR_STRIDES, channels_last ? std::vector{s[1] * s[2] * s[3], int64_t{1}, s[1] * s[3], s[1]}
                                                    : std::vector{s[1] * s[2] * s[3], s[2] * s[3], s[3], int64_t{1}});
    t->set(CUDNN_ATTR_TENSOR_UNIQUE_ID, {id});
    t->set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, {16});
    t->finalize();
    return t;
  };
  const int64_t out = (l.size + 2 * l.pad - l.kernel) / l.stride + 1;
  const auto x = tensor(1, {l.n, l.c, l.size, l.size}, nhwc), w = tensor(2, {l.k, l.c, l.kernel, l.kernel}, krsc),
             y = tensor(3, {l.n, l.k, out, out}, nhwc);

  Described convolution(CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
  const cudnnDataType_t sums = CUDNN_DATA_FLOAT;
  const cudnnConvolutionMode_t mode = CUDNN_CROSS_CORRELATION;
  convolution.set(CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, {2});
  convolution.set(CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &sums);
  convolution.set(CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, 1, &mode);
  convolution.set(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, {l.pad, l.pad});
  convolution.set(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, {l.pad, l.pad});
  convolution.set(CUDNN_ATTR_CONVOLUTION_DILATIONS, {1, 1});
  convolution.set(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, {l.stride, l.stride});
  convolution.finalize();

  Described operation(CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR);
  const float one = 1, zero = 0;
  operation.set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X, *x);
  operation.set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W, *w);
  operation.set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y, *y);
  operation.set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC, convolution);
  operation.set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA, CUDNN_TYPE_FLOAT, 1, &one);
  operation.set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA, CUDNN_TYPE_FLOAT, 1, &zero);
  operation.finalize();
  Described graph(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  graph.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, operation);
  graph.finalize();

  std::map<int64_t, Engine> found;
  const int64_t count = graph.number(CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT);
  for (int64_t id = 0; id < count; id++) {
    Described engine(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    engine.set(CUDNN_ATTR_ENGINE_OPERATION_GRAPH, graph);
    engine.set(CUDNN_ATTR_ENGINE_GLOBAL_INDEX, {id});
    engine.set(CUDNN_ATTR_ENGINE_DEVICEPROP, properties);
    if (!engine.is_possible()) continue;
    const auto behavior = engine.notes<cudnnBackendBehaviorNote_t>(CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE, CUDNN_TYPE_BEHAVIOR_NOTE);
    if (std::ranges::count(behavior, CUDNN_BEHAVIOR_NOTE_RUNTIME_COMPILATION)) continue;
    Described configuration(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR), plan(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
    configuration.set(CUDNN_ATTR_ENGINECFG_ENGINE, engine);
    if (!configuration.is_possible()) continue;
    plan.set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configuration);
    plan.set(CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, properties);
    if (!plan.is_possible()) continue;
    found[id] = {engine.notes<cudnnBackendNumericalNote_t>(CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE),
                 plan.number(CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE)};
  }
  if (type == Type::f32) std::erase_if(found, [](const auto& e) { return !e.second.is_strict(); });
  return found;
}

constexpr const char* kDevices[] = {"a100", "l4", "h100", "rtx5090"};
constexpr Layer kMiddle = {10, 64, 56, 64, 3, 1, 1};

TEST(CudnnAsked, StrictFloat32HasEnginesForLayersOfNetworks) {
  for (const char* device : kDevices)
    for (const Layer& l :
         {Layer{10, 3, 224, 64, 11, 4, 2}, Layer{10, 256, 14, 256, 3, 1, 1}, Layer{10, 64, 56, 256, 1, 1, 0}, kMiddle})
      EXPECT_FALSE(engines(device, l, Type::f32, false, false).empty())
          << device << ": " << l.c << " channels, kernel " << l.kernel;
}

// Why filters are packed as KRSC beside channels_last images (csrc/cuda/core/cudnn.cpp): tensor cores then read images and filter
// where they lie, and of any other order a copy is made in every call. In TF32 only Hopper's do.
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

}  // namespace
