// cuDNN's graph interface on the host, as far as csrc/cuda calls it: descriptors that know which attributes they have, engines
// with notes that tests set, and plans that compute by the definition. What the real one would refuse as wrong is an error here.
#pragma once
#include <map>
#include <memory>
#include <vector>

enum cudnnBackendDescriptorType_t {
  CUDNN_BACKEND_POINTWISE_DESCRIPTOR = 0,
  CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR = 1,
  CUDNN_BACKEND_ENGINE_DESCRIPTOR = 2,
  CUDNN_BACKEND_ENGINECFG_DESCRIPTOR = 3,
  CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR = 4,
  CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR = 5,
  CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR = 10,
  CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR = 11,
  CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR = 12,
  CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR = 13,
  CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR = 15,
  CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR = 16,
  CUDNN_BACKEND_TENSOR_DESCRIPTOR = 17,
  CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR = 38
};
enum cudnnBackendAttributeType_t {
  CUDNN_TYPE_HANDLE = 0,
  CUDNN_TYPE_DATA_TYPE = 1,
  CUDNN_TYPE_BOOLEAN = 2,
  CUDNN_TYPE_INT64 = 3,
  CUDNN_TYPE_FLOAT = 4,
  CUDNN_TYPE_DOUBLE = 5,
  CUDNN_TYPE_VOID_PTR = 6,
  CUDNN_TYPE_CONVOLUTION_MODE = 7,
  CUDNN_TYPE_HEUR_MODE = 8,
  CUDNN_TYPE_NAN_PROPOGATION = 10,
  CUDNN_TYPE_NUMERICAL_NOTE = 11,
  CUDNN_TYPE_POINTWISE_MODE = 14,
  CUDNN_TYPE_BACKEND_DESCRIPTOR = 15,
  CUDNN_TYPE_BEHAVIOR_NOTE = 19
};
enum cudnnBackendAttributeName_t {
  CUDNN_ATTR_POINTWISE_MODE = 0,
  CUDNN_ATTR_POINTWISE_MATH_PREC = 1,
  CUDNN_ATTR_POINTWISE_NAN_PROPAGATION = 2,
  CUDNN_ATTR_CONVOLUTION_COMP_TYPE = 100,
  CUDNN_ATTR_CONVOLUTION_CONV_MODE = 101,
  CUDNN_ATTR_CONVOLUTION_DILATIONS = 102,
  CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES = 103,
  CUDNN_ATTR_CONVOLUTION_POST_PADDINGS = 104,
  CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS = 105,
  CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS = 106,
  CUDNN_ATTR_ENGINEHEUR_MODE = 200,
  CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH = 201,
  CUDNN_ATTR_ENGINEHEUR_RESULTS = 202,
  CUDNN_ATTR_ENGINEHEUR_DEVICEPROP = 204,
  CUDNN_ATTR_ENGINECFG_ENGINE = 300,
  CUDNN_ATTR_EXECUTION_PLAN_HANDLE = 400,
  CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG = 401,
  CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE = 402,
  CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP = 407,
  CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA = 700,
  CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA = 701,
  CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC = 702,
  CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W = 703,
  CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X = 704,
  CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y = 705,
  CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA = 706,
  CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA = 707,
  CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC = 708,
  CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W = 709,
  CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX = 710,
  CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY = 711,
  CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA = 712,
  CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA = 713,
  CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC = 714,
  CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW = 715,
  CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X = 716,
  CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY = 717,
  CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR = 750,
  CUDNN_ATTR_OPERATION_POINTWISE_XDESC = 751,
  CUDNN_ATTR_OPERATION_POINTWISE_BDESC = 752,
  CUDNN_ATTR_OPERATION_POINTWISE_YDESC = 753,
  CUDNN_ATTR_OPERATIONGRAPH_HANDLE = 800,
  CUDNN_ATTR_OPERATIONGRAPH_OPS = 801,
  CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT = 900,
  CUDNN_ATTR_TENSOR_DATA_TYPE = 901,
  CUDNN_ATTR_TENSOR_DIMENSIONS = 902,
  CUDNN_ATTR_TENSOR_STRIDES = 903,
  CUDNN_ATTR_TENSOR_UNIQUE_ID = 906,
  CUDNN_ATTR_TENSOR_IS_VIRTUAL = 907,
  CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS = 1000,
  CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS = 1001,
  CUDNN_ATTR_VARIANT_PACK_WORKSPACE = 1003,
  CUDNN_ATTR_ENGINE_NUMERICAL_NOTE = 1303,
  CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE = 1305
};
enum cudnnBackendHeurMode_t { CUDNN_HEUR_MODE_FALLBACK = 2, CUDNN_HEUR_MODE_A = 3 };
enum cudnnBackendNumericalNote_t {
  CUDNN_NUMERICAL_NOTE_TENSOR_CORE = 0,
  CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS = 1,
  CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION = 2,
  CUDNN_NUMERICAL_NOTE_FFT = 3,
  CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC = 4,
  CUDNN_NUMERICAL_NOTE_WINOGRAD = 5,
  CUDNN_NUMERICAL_NOTE_STRICT_NAN_PROP = 9
};
enum cudnnBackendBehaviorNote_t { CUDNN_BEHAVIOR_NOTE_RUNTIME_COMPILATION = 0, CUDNN_BEHAVIOR_NOTE_CUBLASLT_DEPENDENCY = 4 };
enum cudnnPointwiseMode_t { CUDNN_POINTWISE_ADD = 0, CUDNN_POINTWISE_MUL = 1, CUDNN_POINTWISE_RELU_FWD = 100 };

namespace fake {
// An engine, of which tests say what it is. Mode A names those that are `named`, in this order, the fallback the others.
struct DnnEngine {
  std::vector<cudnnBackendNumericalNote_t> numerical = {};
  std::vector<cudnnBackendBehaviorNote_t> behavior = {};
  int64_t alignment = 1, workspace = 100;
  bool named = true, adds_bias = true, has_gradients = true;
  cudnnStatus_t status = CUDNN_STATUS_SUCCESS;  // of its plans
};
inline const std::vector<DnnEngine> kDnnEngines = {
    {.behavior = {CUDNN_BEHAVIOR_NOTE_RUNTIME_COMPILATION}},
    {.numerical = {CUDNN_NUMERICAL_NOTE_WINOGRAD}},
    {.numerical = {CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC}},
    {.numerical = {CUDNN_NUMERICAL_NOTE_TENSOR_CORE, CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS}, .alignment = 16},
    {.numerical = {CUDNN_NUMERICAL_NOTE_TENSOR_CORE}, .alignment = 16, .workspace = 300},
    {.numerical = {CUDNN_NUMERICAL_NOTE_STRICT_NAN_PROP}, .named = false}};
// What tests set, and look at.
inline thread_local std::vector<DnnEngine> dnn_engines = kDnnEngines;
inline thread_local size_t dnn_engine_used = 0;
inline thread_local int64_t dnn_alignment_used = 0;  // that the plan may take for granted
inline std::atomic<int64_t> dnn_plans = 0, dnn_plans_made = 0;

// What a descriptor's pointer leads to. Descriptors share those that they refer to, which so may be destroyed before them.
struct DnnDescribed {
  cudnnBackendDescriptorType_t type;
  bool is_final = false;
  size_t engine = 0;
  std::map<cudnnBackendAttributeName_t, std::vector<char>> values = {};
  std::map<cudnnBackendAttributeName_t, std::vector<std::shared_ptr<DnnDescribed>>> others = {};

  DnnDescribed(cudnnBackendDescriptorType_t t) : type(t) {}
  ~DnnDescribed() {
    if (type == CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR && is_final) dnn_plans--;
  }
  template <class T>
  std::vector<T> all(cudnnBackendAttributeName_t name) const {
    const std::vector<char>& bytes = values.at(name);
    std::vector<T> result(bytes.size() / sizeof(T));
    std::memcpy(result.data(), bytes.data(), bytes.size());
    return result;
  }
  template <class T>
  T one(cudnnBackendAttributeName_t name) const {
    T value;
    std::memcpy(&value, values.at(name).data(), sizeof(value));
    return value;
  }
  const DnnDescribed& other(cudnnBackendAttributeName_t name) const { return *others.at(name).at(0); }
  std::vector<int64_t> numbers(cudnnBackendAttributeName_t name) const { return all<int64_t>(name); }
  int64_t id() const { return one<int64_t>(CUDNN_ATTR_TENSOR_UNIQUE_ID); }
  bool is_virtual() const { return values.contains(CUDNN_ATTR_TENSOR_IS_VIRTUAL) && one<bool>(CUDNN_ATTR_TENSOR_IS_VIRTUAL); }
};
struct DnnPointer {
  std::shared_ptr<DnnDescribed> to;
};

// The attributes that a descriptor has: their type, how many of it, and what they refer to.
struct DnnAttribute {
  cudnnBackendDescriptorType_t of;
  cudnnBackendAttributeName_t name;
  cudnnBackendAttributeType_t type;
  int64_t least = 1, most = 1;
  bool is_needed = true;
  cudnnBackendDescriptorType_t to = CUDNN_BACKEND_TENSOR_DESCRIPTOR, or_to = to;
};
inline constexpr DnnAttribute kDnnAttributes[] = {
    {CUDNN_BACKEND_TENSOR_DESCRIPTOR, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE},
    {CUDNN_BACKEND_TENSOR_DESCRIPTOR, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, 4},
    {CUDNN_BACKEND_TENSOR_DESCRIPTOR, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, 4},
    {CUDNN_BACKEND_TENSOR_DESCRIPTOR, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64},
    {CUDNN_BACKEND_TENSOR_DESCRIPTOR, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64},
    {CUDNN_BACKEND_TENSOR_DESCRIPTOR, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, 1, false},
    {CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR, CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, CUDNN_TYPE_INT64},
    {CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR, CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE},
    {CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR, CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE},
    {CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR, CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, CUDNN_TYPE_INT64, 2, 2},
    {CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR, CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, CUDNN_TYPE_INT64, 2, 2},
    {CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR, CUDNN_ATTR_CONVOLUTION_DILATIONS, CUDNN_TYPE_INT64, 2, 2},
    {CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR, CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, CUDNN_TYPE_INT64, 2, 2},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
     CUDNN_TYPE_BACKEND_DESCRIPTOR},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
     CUDNN_TYPE_BACKEND_DESCRIPTOR},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
     CUDNN_TYPE_BACKEND_DESCRIPTOR},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
     CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, 1, true, CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA, CUDNN_TYPE_FLOAT},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA, CUDNN_TYPE_DOUBLE},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA, CUDNN_TYPE_FLOAT},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA, CUDNN_TYPE_DOUBLE},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
     CUDNN_TYPE_BACKEND_DESCRIPTOR},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
     CUDNN_TYPE_BACKEND_DESCRIPTOR},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
     CUDNN_TYPE_BACKEND_DESCRIPTOR},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
     CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, 1, true, CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
     CUDNN_TYPE_FLOAT},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
     CUDNN_TYPE_DOUBLE},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA,
     CUDNN_TYPE_FLOAT},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA,
     CUDNN_TYPE_DOUBLE},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
     CUDNN_TYPE_BACKEND_DESCRIPTOR},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
     CUDNN_TYPE_BACKEND_DESCRIPTOR},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
     CUDNN_TYPE_BACKEND_DESCRIPTOR},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
     CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, 1, true, CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
     CUDNN_TYPE_FLOAT},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
     CUDNN_TYPE_DOUBLE},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA,
     CUDNN_TYPE_FLOAT},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA,
     CUDNN_TYPE_DOUBLE},
    {CUDNN_BACKEND_POINTWISE_DESCRIPTOR, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE},
    {CUDNN_BACKEND_POINTWISE_DESCRIPTOR, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE},
    {CUDNN_BACKEND_POINTWISE_DESCRIPTOR, CUDNN_ATTR_POINTWISE_NAN_PROPAGATION, CUDNN_TYPE_NAN_PROPOGATION, 1, 1, false},
    {CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1,
     1, true, CUDNN_BACKEND_POINTWISE_DESCRIPTOR},
    {CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, CUDNN_TYPE_BACKEND_DESCRIPTOR},
    {CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, 1,
     false},
    {CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, CUDNN_TYPE_BACKEND_DESCRIPTOR},
    {CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE},
    {CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, 4, true,
     CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR},
    {CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, 1, true,
     CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR},
    {CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE},
    {CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE},
    {CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, 1, true,
     CUDNN_BACKEND_ENGINECFG_DESCRIPTOR},
    {CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, 1, 8},
    {CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, 1, 8},
    {CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR}};

inline size_t dnn_bytes(cudnnBackendAttributeType_t type) {
  switch (type) {
    case CUDNN_TYPE_HANDLE:
    case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_DOUBLE: return 8;
    case CUDNN_TYPE_BOOLEAN: return 1;
    default: return 4;
  }
}
inline cudnnStatus_t dnn_wrong(const char* what) { return dnn_fail(CUDNN_STATUS_BAD_PARAM, what); }

// The operations that a graph begins with, and how their attributes are called.
struct DnnProduct {
  cudnnBackendDescriptorType_t type;
  cudnnBackendAttributeName_t x, w, y, convolution, alpha, beta;
};
inline constexpr DnnProduct kDnnProducts[] = {
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
     CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
     CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
     CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA}};
inline const DnnProduct* product_of(cudnnBackendDescriptorType_t type) {
  for (const DnnProduct& p : kDnnProducts)
    if (p.type == type) return &p;
  return nullptr;
}

// What the descriptors of a graph say, as the old interface's do.
struct DnnGraph {
  const DnnProduct* product;
  DnnTensor x, y;
  DnnFilter w;
  DnnConvolution convolution;
  std::vector<const DnnDescribed*> tensors;  // that a call gives memory for: x, w, y, and what is added
  std::vector<const DnnDescribed*> sums;     // between one operation and the next
  const DnnDescribed *bias = nullptr, *residual = nullptr;
  bool relu = false;
  bool is_forward() const { return product == kDnnProducts; }
};
inline DnnTensor dnn_tensor(const DnnDescribed& t) {
  DnnTensor result{t.one<cudnnDataType_t>(CUDNN_ATTR_TENSOR_DATA_TYPE), {}, {}};
  for (size_t i = 0; i < 4; i++)
    result.size[i] = t.numbers(CUDNN_ATTR_TENSOR_DIMENSIONS)[i], result.stride[i] = t.numbers(CUDNN_ATTR_TENSOR_STRIDES)[i];
  return result;
}
inline bool dnn_adds(const DnnDescribed& operation) {
  return operation.other(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR).one<cudnnPointwiseMode_t>(CUDNN_ATTR_POINTWISE_MODE) ==
         CUDNN_POINTWISE_ADD;
}
inline bool same_sizes(const DnnTensor& a, const DnnTensor& b) { return std::equal(a.size, a.size + 4, b.size); }
// The operations after the first: a residual is added, then a bias, then relu is applied. `last`: whose value comes out.
inline cudnnStatus_t dnn_epilogue(const std::vector<std::shared_ptr<DnnDescribed>>& operations, cudnnDataType_t compute,
                                  const DnnDescribed*& last, DnnGraph& g) {
  for (size_t i = 1; i < operations.size(); i++) {
    const DnnDescribed& operation = *operations[i];
    if (operation.type != CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR || !g.is_forward() || g.relu)
      return dnn_wrong("another operation behind the products");
    const DnnDescribed& how = operation.other(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR);
    if (&operation.other(CUDNN_ATTR_OPERATION_POINTWISE_XDESC) != last || !last->is_virtual() ||
        dnn_tensor(*last).type != compute || !same_sizes(dnn_tensor(*last), g.y) ||
        how.one<cudnnDataType_t>(CUDNN_ATTR_POINTWISE_MATH_PREC) != compute)
      return dnn_wrong("does not go on with the sums before");
    g.sums.push_back(last);
    const bool has_other = operation.others.contains(CUDNN_ATTR_OPERATION_POINTWISE_BDESC);
    if (how.one<cudnnPointwiseMode_t>(CUDNN_ATTR_POINTWISE_MODE) == CUDNN_POINTWISE_RELU_FWD) {
      if (has_other || !how.values.contains(CUDNN_ATTR_POINTWISE_NAN_PROPAGATION) ||
          how.one<cudnnNanPropagation_t>(CUDNN_ATTR_POINTWISE_NAN_PROPAGATION) != CUDNN_PROPAGATE_NAN)
        return dnn_wrong("relu of two operands, or one that hides NaN");
      g.relu = true;
    } else {
      if (!has_other || how.one<cudnnPointwiseMode_t>(CUDNN_ATTR_POINTWISE_MODE) != CUDNN_POINTWISE_ADD || g.bias)
        return dnn_wrong("another operation, or one behind the bias");
      const DnnDescribed& added = operation.other(CUDNN_ATTR_OPERATION_POINTWISE_BDESC);
      const DnnTensor t = dnn_tensor(added);
      const bool is_bias = t.size[0] == 1 && t.size[1] == g.y.size[1] && t.size[2] == 1 && t.size[3] == 1 && t.stride[1] == 1;
      const bool is_residual = same_sizes(t, g.y) && std::equal(t.stride, t.stride + 4, g.y.stride);
      if (t.type != g.x.type || (!is_bias && (!is_residual || g.residual))) return dnn_wrong("adds neither residual nor bias");
      // A residual comes first; of one output of one pixel the two look alike.
      (is_bias && (!is_residual || g.residual || i + 1 == operations.size() || !dnn_adds(*operations[i + 1])) ? g.bias
                                                                                                              : g.residual) =
          &added;
      g.tensors.push_back(&added);
    }
    last = &operation.other(CUDNN_ATTR_OPERATION_POINTWISE_YDESC);
  }
  return CUDNN_STATUS_SUCCESS;
}
inline cudnnStatus_t dnn_graph(const DnnDescribed& graph, DnnGraph& g) {
  const auto& operations = graph.others.at(CUDNN_ATTR_OPERATIONGRAPH_OPS);
  const DnnDescribed& first = *operations[0];
  g.product = product_of(first.type);
  if (!g.product) return dnn_wrong("begins with another operation");
  const DnnDescribed &x = first.other(g.product->x), &w = first.other(g.product->w), &sums = first.other(g.product->y),
                     &c = first.other(g.product->convolution);
  g.x = dnn_tensor(x), g.y = dnn_tensor(sums);
  g.tensors = {&x, &w};
  g.convolution = {};
  for (size_t i = 0; i < 2; i++) {
    g.convolution.pad[i] = c.numbers(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS)[i];
    if (c.numbers(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS)[i] != g.convolution.pad[i]) return dnn_wrong("another padding behind");
    g.convolution.stride[i] = c.numbers(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES)[i];
    g.convolution.dilation[i] = c.numbers(CUDNN_ATTR_CONVOLUTION_DILATIONS)[i];
  }
  g.convolution.compute = c.one<cudnnDataType_t>(CUDNN_ATTR_CONVOLUTION_COMP_TYPE);
  const DnnTensor filter = dnn_tensor(w);
  const int64_t channels = filter.size[1], r = filter.size[2], s = filter.size[3];
  const int64_t krsc[] = {channels * r * s, 1, s * channels, channels};
  if (is_nchw(filter))
    g.w = {filter.type, CUDNN_TENSOR_NCHW, {}};
  else if (std::equal(krsc, krsc + 4, filter.stride))
    g.w = {filter.type, CUDNN_TENSOR_NHWC, {}};
  else
    return dnn_fail(CUDNN_STATUS_NOT_SUPPORTED_LAYOUT, "this filter");
  std::copy_n(filter.size, 4, g.w.size);
  const cudnnDataType_t compute = g.x.type == CUDNN_DATA_DOUBLE ? CUDNN_DATA_DOUBLE : CUDNN_DATA_FLOAT;
  const size_t factor = compute == CUDNN_DATA_DOUBLE ? 8 : 4;
  if (first.values.at(g.product->alpha).size() != factor || first.values.at(g.product->beta).size() != factor)
    return dnn_wrong("factors of another type");
  const DnnDescribed* last = &sums;
  if (const cudnnStatus_t status = dnn_epilogue(operations, compute, last, g)) return status;
  g.tensors.insert(g.tensors.begin() + 2, last);
  const DnnTensor y = dnn_tensor(*last);
  if (g.convolution.compute != compute || g.x.type != g.w.type || g.x.type != y.type || channels < 1 ||
      g.x.size[1] % channels != 0 || c.one<cudnnConvolutionMode_t>(CUDNN_ATTR_CONVOLUTION_CONV_MODE) != CUDNN_CROSS_CORRELATION ||
      c.one<int64_t>(CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS) != 2)
    return dnn_wrong("types or channels of another problem");
  g.convolution.groups = g.x.size[1] / channels;
  bool fits = g.w.size[0] % g.convolution.groups == 0 && g.y.size[0] == g.x.size[0] && g.y.size[1] == g.w.size[0];
  for (int d : {0, 1})
    fits &= g.y.size[d + 2] == (g.x.size[d + 2] + 2 * g.convolution.pad[d] - g.convolution.dilation[d] * (g.w.size[d + 2] - 1) -
                                1) / g.convolution.stride[d] +
                                   1;
  if (!fits || !same_sizes(g.y, y)) return dnn_wrong("sizes of another problem");
  g.y = y;
  for (const DnnDescribed* t : g.tensors)
    if (t->is_virtual()) return dnn_wrong("a tensor without memory at an end");
  std::vector<const DnnDescribed*> all = g.tensors;
  all.insert(all.end(), g.sums.begin(), g.sums.end());
  std::vector<int64_t> ids;
  for (const DnnDescribed* t : all) {
    if (std::find(ids.begin(), ids.end(), t->id()) != ids.end()) return dnn_wrong("two tensors with one number");
    ids.push_back(t->id());
  }
  return CUDNN_STATUS_SUCCESS;
}

// dX or dW, by the definition of the convolution: each of its products is one of theirs.
inline cudnnStatus_t dnn_gradient(cudnnHandle_t handle, const DnnGraph& g, void* xs, void* ws, const void* gy, void* workspace,
                                  size_t workspace_bytes) {
  if (const cudnnStatus_t status = dnn_begin(handle, g.w, g.convolution, workspace, workspace_bytes)) return status;
  const DnnConvolution& c = g.convolution;
  const bool of_input = g.product == &kDnnProducts[1];
  ai3::with_type(dtype_of(g.x.type), [&]<class T>() {
    using A = ai3::Acc<T>;
    std::map<int64_t, A> sums;  // by place
    T *const x = static_cast<T*>(xs), *const w = static_cast<T*>(ws);
    auto input = [&](int64_t n, int64_t d, int64_t h, int64_t v) {
      return n * g.x.stride[0] + d * g.x.stride[1] + h * g.x.stride[2] + v * g.x.stride[3];
    };
    auto weight = [&](int64_t k, int64_t d, int64_t r, int64_t s) {
      return g.w.format == CUDNN_TENSOR_NCHW ? ((k * g.w.size[1] + d) * g.w.size[2] + r) * g.w.size[3] + s
                                             : ((k * g.w.size[2] + r) * g.w.size[3] + s) * g.w.size[1] + d;
    };
    const auto& size = of_input ? g.x.size : g.w.size;
    for (int64_t a = 0; a < size[0]; a++)
      for (int64_t b = 0; b < size[1]; b++)
        for (int64_t i = 0; i < size[2]; i++)
          for (int64_t j = 0; j < size[3]; j++) sums[of_input ? input(a, b, i, j) : weight(a, b, i, j)] = 0;
    for (int64_t n = 0; n < g.y.size[0]; n++)
      for (int64_t k = 0; k < g.y.size[1]; k++)
        for (int64_t i = 0; i < g.y.size[2]; i++)
          for (int64_t j = 0; j < g.y.size[3]; j++) {
            const A grad = ai3::widen(
                static_cast<const T*>(gy)[n * g.y.stride[0] + k * g.y.stride[1] + i * g.y.stride[2] + j * g.y.stride[3]]);
            for (int64_t d = 0; d < g.w.size[1]; d++)
              for (int64_t r = 0; r < g.w.size[2]; r++)
                for (int64_t s = 0; s < g.w.size[3]; s++) {
                  const int64_t h = i * c.stride[0] - c.pad[0] + r * c.dilation[0],
                                u = j * c.stride[1] - c.pad[1] + s * c.dilation[1];
                  if (h < 0 || h >= g.x.size[2] || u < 0 || u >= g.x.size[3]) continue;
                  const int64_t of_x = input(n, k / (g.w.size[0] / c.groups) * g.w.size[1] + d, h, u), of_w = weight(k, d, r, s);
                  sums[of_input ? of_x : of_w] += grad * ai3::widen(of_input ? w[of_w] : x[of_x]);
                }
          }
    for (const auto& [place, sum] : sums) (of_input ? x : w)[place] = ai3::narrowed<T>(sum);
  });
  handle->busy = false;
  return CUDNN_STATUS_SUCCESS;
}

inline const DnnDescribed& dnn_graph_of(const DnnDescribed& plan) {
  return plan.other(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG).other(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH);
}
inline cudnnStatus_t dnn_finalize(DnnDescribed& d) {
  switch (d.type) {
    case CUDNN_BACKEND_TENSOR_DESCRIPTOR: {
      const int64_t alignment = d.one<int64_t>(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT);
      for (const int64_t size : d.numbers(CUDNN_ATTR_TENSOR_DIMENSIONS))
        if (size < 1) return dnn_wrong("a size below 1");
      return alignment > 0 && (alignment & (alignment - 1)) == 0 ? CUDNN_STATUS_SUCCESS : dnn_wrong("this alignment");
    }
    case CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR: {
      DnnGraph graph;
      if (d.one<Dnn*>(CUDNN_ATTR_OPERATIONGRAPH_HANDLE)->device != device) return dnn_wrong("the handle of another device");
      return dnn_graph(d, graph);
    }
    case CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR: return dnn_answer ? dnn_fail(dnn_answer, "for a test") : CUDNN_STATUS_SUCCESS;
    case CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR: {
      if (forbidden()) return dnn_fail(CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED, "a plan is made in a capture");
      d.engine = d.other(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG).engine;
      const DnnEngine& engine = dnn_engines.at(d.engine);
      if (engine.status) return dnn_fail(engine.status, "this engine");
      const DnnDescribed& from = dnn_graph_of(d);
      DnnGraph graph;
      if (const cudnnStatus_t status = dnn_graph(from, graph)) return status;
      if (d.one<Dnn*>(CUDNN_ATTR_EXECUTION_PLAN_HANDLE) != from.one<Dnn*>(CUDNN_ATTR_OPERATIONGRAPH_HANDLE))
        return dnn_wrong("another handle than the graph's");
      if (graph.bias && !engine.adds_bias) return dnn_fail(CUDNN_STATUS_NOT_SUPPORTED, "this epilogue");
      if (!graph.bias && (graph.residual || graph.relu)) return dnn_fail(CUDNN_STATUS_NOT_SUPPORTED, "no bias before them");
      if (!graph.is_forward() && !engine.has_gradients) return dnn_fail(CUDNN_STATUS_NOT_SUPPORTED, "no gradients");
      for (const DnnDescribed* t : graph.tensors)
        if (t->one<int64_t>(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT) < engine.alignment)
          return dnn_fail(CUDNN_STATUS_NOT_SUPPORTED, "this alignment");
      dnn_plans++, dnn_plans_made++;
      return CUDNN_STATUS_SUCCESS;
    }
    case CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR: {
      const auto pointers = d.all<void*>(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
      if (pointers.size() != d.numbers(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS).size() ||
          std::find(pointers.begin(), pointers.end(), nullptr) != pointers.end())
        return dnn_wrong("tensors without memory");
      return CUDNN_STATUS_SUCCESS;
    }
    default: return CUDNN_STATUS_SUCCESS;
  }
}
}  // namespace fake
using cudnnBackendDescriptor_t = fake::DnnPointer*;

inline cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t* d) {
  *d = new fake::DnnPointer{std::make_shared<fake::DnnDescribed>(type)};
  return CUDNN_STATUS_SUCCESS;
}
inline cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t d) {
  delete d;
  return CUDNN_STATUS_SUCCESS;
}
inline cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
                                              cudnnBackendAttributeType_t type, int64_t count, const void* values) {
  fake::DnnDescribed& of = *d->to;
  if (of.is_final) return fake::dnn_wrong("it is finalized");
  const fake::DnnAttribute* found = nullptr;
  for (const fake::DnnAttribute& a : fake::kDnnAttributes)
    if (a.of == of.type && a.name == name && a.type == type && count >= a.least && count <= a.most) found = &a;
  if (!found) return fake::dnn_wrong("no such attribute, or not of this type and number");
  if (type != CUDNN_TYPE_BACKEND_DESCRIPTOR) {
    const char* const bytes = static_cast<const char*>(values);
    of.values[name] = {bytes, bytes + static_cast<size_t>(count) * fake::dnn_bytes(type)};
    return CUDNN_STATUS_SUCCESS;
  }
  of.others[name].clear();
  for (int64_t i = 0; i < count; i++) {
    const auto& other = static_cast<const cudnnBackendDescriptor_t*>(values)[i]->to;
    const bool fits =
        other->type == found->to || other->type == found->or_to || (found->or_to != found->to && fake::product_of(other->type));
    if (!other->is_final || !fits) return fake::dnn_wrong("refers to a descriptor that is not finalized, or of another type");
    of.others[name].push_back(other);
  }
  return CUDNN_STATUS_SUCCESS;
}
inline cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t d) {
  fake::DnnDescribed& of = *d->to;
  if (of.is_final) return fake::dnn_wrong("it is finalized");
  for (const fake::DnnAttribute& a : fake::kDnnAttributes)
    if (a.of == of.type && a.is_needed && !of.values.contains(a.name) && !of.others.contains(a.name))
      return fake::dnn_wrong("an attribute is missing");
  const cudnnStatus_t status = fake::dnn_finalize(of);
  of.is_final = !status;
  return status;
}
inline cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
                                              cudnnBackendAttributeType_t type, int64_t most, int64_t* count, void* values) {
  const fake::DnnDescribed& of = *d->to;
  if (!of.is_final) return fake::dnn_wrong("it is not finalized");
  *count = 0;
  auto give_number = [&](cudnnBackendAttributeType_t expected, const auto& value) {
    if (type != expected) return fake::dnn_wrong("not of this type");
    if ((*count)++ < most)
      std::memcpy(static_cast<char*>(values) + (*count - 1) * static_cast<int64_t>(sizeof(value)), &value, sizeof(value));
    return CUDNN_STATUS_SUCCESS;
  };
  // A descriptor of its own, which the caller has made, of the type.
  auto give = [&](cudnnBackendDescriptorType_t expected, size_t engine, auto graph) {
    if (type != CUDNN_TYPE_BACKEND_DESCRIPTOR) return fake::dnn_wrong("not of this type");
    if ((*count)++ >= most) return CUDNN_STATUS_SUCCESS;
    fake::DnnDescribed& to = *static_cast<cudnnBackendDescriptor_t*>(values)[*count - 1]->to;
    if (to.type != expected || to.is_final) return fake::dnn_wrong("results of another type");
    to.engine = engine, to.is_final = true, to.others[CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH] = {graph};
    return CUDNN_STATUS_SUCCESS;
  };
  cudnnStatus_t status = CUDNN_STATUS_SUCCESS;
  const auto& engines = fake::dnn_engines;
  if (of.type == CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR && name == CUDNN_ATTR_ENGINEHEUR_RESULTS) {
    const bool named = of.one<cudnnBackendHeurMode_t>(CUDNN_ATTR_ENGINEHEUR_MODE) == CUDNN_HEUR_MODE_A;
    for (size_t i = 0; i < engines.size() && !status; i++)
      if (engines[i].named == named)
        status = give(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, i, of.others.at(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH)[0]);
    return status;
  }
  if (of.type == CUDNN_BACKEND_ENGINECFG_DESCRIPTOR && name == CUDNN_ATTR_ENGINECFG_ENGINE)
    return give(CUDNN_BACKEND_ENGINE_DESCRIPTOR, of.engine, of.others.at(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH)[0]);
  if (of.type == CUDNN_BACKEND_ENGINE_DESCRIPTOR && name == CUDNN_ATTR_ENGINE_NUMERICAL_NOTE) {
    for (const auto note : engines.at(of.engine).numerical)
      if (!status) status = give_number(CUDNN_TYPE_NUMERICAL_NOTE, note);
    return status;
  }
  if (of.type == CUDNN_BACKEND_ENGINE_DESCRIPTOR && name == CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE) {
    for (const auto note : engines.at(of.engine).behavior)
      if (!status) status = give_number(CUDNN_TYPE_BEHAVIOR_NOTE, note);
    return status;
  }
  if (of.type == CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR && name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE)
    return give_number(CUDNN_TYPE_INT64, engines.at(of.engine).workspace);
  return fake::dnn_wrong("no such attribute to read");
}
inline cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t pack) {
  const fake::DnnDescribed &p = *plan->to, &v = *pack->to;
  if (p.type != CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR || v.type != CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR || !p.is_final ||
      !v.is_final || p.one<cudnnHandle_t>(CUDNN_ATTR_EXECUTION_PLAN_HANDLE) != handle)
    return fake::dnn_wrong("no plan of this handle's");
  fake::DnnGraph g;
  if (const cudnnStatus_t status = fake::dnn_graph(fake::dnn_graph_of(p), g)) return status;
  const auto ids = v.numbers(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
  const auto pointers = v.all<void*>(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
  std::map<const fake::DnnDescribed*, void*> memory;
  for (const fake::DnnDescribed* t : g.tensors) {
    const auto found = std::find(ids.begin(), ids.end(), t->id());
    if (found == ids.end() || ids.size() != g.tensors.size()) return fake::dnn_wrong("tensors of another graph");
    void* const place = memory[t] = pointers[static_cast<size_t>(found - ids.begin())];
    fake::dnn_alignment_used = t->one<int64_t>(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT);
    if (reinterpret_cast<uintptr_t>(place) % static_cast<uintptr_t>(fake::dnn_alignment_used) != 0)
      return fake::dnn_wrong("a tensor that lies otherwise than was said");
  }
  void *const x = memory[g.tensors[0]], *const w = memory[g.tensors[1]], *const y = memory[g.tensors[2]];
  if (g.residual && memory[g.residual] == y) return fake::dnn_wrong("writes over the residual");
  fake::dnn_engine_used = p.engine;
  void* const workspace = v.one<void*>(CUDNN_ATTR_VARIANT_PACK_WORKSPACE);
  const auto bytes = static_cast<size_t>(fake::dnn_engines.at(p.engine).workspace);
  if (!g.is_forward()) return fake::dnn_gradient(handle, g, x, w, y, workspace, bytes);
  const fake::DnnDescribed& convolution = *fake::dnn_graph_of(p).others.at(CUDNN_ATTR_OPERATIONGRAPH_OPS)[0];
  return fake::dnn_convolve(handle, convolution.values.at(g.product->alpha).data(), &g.x, x, &g.w, w, &g.convolution,
                            CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_GEMM, workspace, bytes,
                            convolution.values.at(g.product->beta).data(), g.bias ? memory[g.bias] : nullptr, &g.y, y,
                            g.residual ? memory[g.residual] : nullptr, g.relu);
}
