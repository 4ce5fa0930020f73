#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cudnn.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

std::string words_of(cudnnStatus_t status) {
  char more[256] = "";
  cudnnGetLastErrorString(more, sizeof(more));
  return std::string(cudnnGetErrorString(status)) + (*more ? std::string(": ") + more : "");
}
void check(cudnnStatus_t status, const char* what) {
  if (status != CUDNN_STATUS_SUCCESS) throw std::runtime_error(std::string("ai3: ") + what + ": " + words_of(status));
}

int current_device() {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

// A thread's handles, one for each device. A thread that ends leaves them to the next, since a handle takes milliseconds and
// device memory to make; none is destroyed, because CUDA may be gone when the process ends.
class Handles {
 public:
  ~Handles() {
    const std::lock_guard lock(mutex());
    for (const auto& handle : mine_) idle().push_back(handle);
  }
  cudnnHandle_t on(int device) {
    auto of_device = [&](const auto& handle) { return handle.first == device; };
    if (const auto found = std::find_if(mine_.begin(), mine_.end(), of_device); found != mine_.end()) return found->second;
    {
      const std::lock_guard lock(mutex());
      if (const auto found = std::find_if(idle().begin(), idle().end(), of_device); found != idle().end()) {
        mine_.push_back(*found);
        idle().erase(found);
        return mine_.back().second;
      }
    }
    cudnnHandle_t handle = nullptr;
    check(cudnnCreate(&handle), "cudnnCreate");
    mine_.emplace_back(device, handle);
    return handle;
  }

 private:
  using List = std::vector<std::pair<int, cudnnHandle_t>>;
  static std::mutex& mutex() {
    static auto& one = *new std::mutex;
    return one;
  }
  static List& idle() {
    static auto& list = *new List;
    return list;
  }
  List mine_;
};
cudnnHandle_t handle_on(int device) {
  static thread_local Handles handles;
  return handles.on(device);
}

// A descriptor that is destroyed with its owner.
template <class D, cudnnStatus_t (*create)(D*), cudnnStatus_t (*destroy)(D)>
class Descriptor {
 public:
  Descriptor() { check(create(&descriptor_), "a cuDNN descriptor"); }
  ~Descriptor() { destroy(descriptor_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  operator D() const { return descriptor_; }

 private:
  D descriptor_;
};
using TensorDescriptor = Descriptor<cudnnTensorDescriptor_t, cudnnCreateTensorDescriptor, cudnnDestroyTensorDescriptor>;
using FilterDescriptor = Descriptor<cudnnFilterDescriptor_t, cudnnCreateFilterDescriptor, cudnnDestroyFilterDescriptor>;
using ConvolutionDescriptor =
    Descriptor<cudnnConvolutionDescriptor_t, cudnnCreateConvolutionDescriptor, cudnnDestroyConvolutionDescriptor>;

// What is asked of cuDNN once for each problem. Nothing changes in it afterwards, so threads share it.
struct Plan {
  TensorDescriptor x, y;
  FilterDescriptor w;
  ConvolutionDescriptor convolution;
  size_t workspace = 0;
  std::string refusal;  // empty: supported
};

// A problem by value, as far as the plan depends on it.
using Key = std::array<int64_t, 28>;
Key key_of(const Conv2dProblem& p, cudnnConvolutionFwdAlgo_t method, int device) {
  return {device,          method,         static_cast<int64_t>(p.dtype),
          p.allow_tf32,    p.batch,        p.in_channels,
          p.in_height,     p.in_width,     p.out_channels,
          p.kernel_height, p.kernel_width, p.out_height,
          p.out_width,     p.stride_h,     p.stride_w,
          p.pad_h,         p.pad_w,        p.dilation_h,
          p.dilation_w,    p.groups,       p.x_stride.n,
          p.x_stride.c,    p.x_stride.h,   p.x_stride.w,
          p.y_stride.n,    p.y_stride.c,   p.y_stride.h,
          p.y_stride.w};
}

// Sets the descriptors and asks for the workspace.
cudnnStatus_t ask(const Conv2dProblem& p, cudnnConvolutionFwdAlgo_t method, cudnnHandle_t handle, Plan& plan) {
  const cudnnDataType_t type = p.dtype == DType::f64    ? CUDNN_DATA_DOUBLE
                               : p.dtype == DType::f32  ? CUDNN_DATA_FLOAT
                               : p.dtype == DType::bf16 ? CUDNN_DATA_BFLOAT16
                                                        : CUDNN_DATA_HALF;
  // Tensor cores multiply half types exactly; float32 they would round to TF32.
  const cudnnMathType_t math = size_of(p.dtype) == 2                    ? CUDNN_TENSOR_OP_MATH
                               : p.dtype == DType::f32 && !p.allow_tf32 ? CUDNN_FMA_MATH
                                                                        : CUDNN_DEFAULT_MATH;
  auto to = [](int64_t value) { return static_cast<int>(value); };
  auto tensor = [&](cudnnTensorDescriptor_t t, int64_t channels, int64_t height, int64_t width, const Strides4& s) {
    return cudnnSetTensor4dDescriptorEx(t, type, to(p.batch), to(channels), to(height), to(width), to(s.n), to(s.c), to(s.h),
                                        to(s.w));
  };
  cudnnStatus_t status = tensor(plan.x, p.in_channels, p.in_height, p.in_width, p.x_stride);
  if (!status) status = tensor(plan.y, p.out_channels, p.out_height, p.out_width, p.y_stride);
  if (!status)
    status = cudnnSetFilter4dDescriptor(plan.w, type, CUDNN_TENSOR_NCHW, to(p.out_channels), to(p.in_channels / p.groups),
                                        to(p.kernel_height), to(p.kernel_width));
  if (!status)
    status = cudnnSetConvolution2dDescriptor(plan.convolution, to(p.pad_h), to(p.pad_w), to(p.stride_h), to(p.stride_w),
                                             to(p.dilation_h), to(p.dilation_w), CUDNN_CROSS_CORRELATION,
                                             type == CUDNN_DATA_DOUBLE ? CUDNN_DATA_DOUBLE : CUDNN_DATA_FLOAT);
  if (!status) status = cudnnSetConvolutionGroupCount(plan.convolution, to(p.groups));
  if (!status) status = cudnnSetConvolutionMathType(plan.convolution, math);
  return status
             ? status
             : cudnnGetConvolutionForwardWorkspaceSize(handle, plan.x, plan.w, plan.convolution, plan.y, method, &plan.workspace);
}

std::shared_ptr<const Plan> make_plan(const Conv2dProblem& p, const Key& key, cudnnConvolutionFwdAlgo_t method,
                                      cudnnHandle_t handle) {
  auto plan = std::make_shared<Plan>();
  // Descriptors have 32 bits for each number.
  if (const auto largest = std::max_element(key.begin(), key.end()); *largest > INT32_MAX) {
    plan->refusal = "cuDNN takes sizes and strides below 2147483648, got " + std::to_string(*largest);
    return plan;
  }
  const cudnnStatus_t status = ask(p, method, handle, *plan);
  const int category = status / 1000 * 1000;
  if (category == CUDNN_STATUS_NOT_SUPPORTED || category == CUDNN_STATUS_BAD_PARAM)
    plan->refusal = "cuDNN refuses: " + words_of(status);
  else
    check(status, "cudnnGetConvolutionForwardWorkspaceSize");  // such as memory that is missing now: nothing to keep
  return plan;
}

// The plan of a problem, from the table of all threads or made for it. The table is emptied when it is full: a plan is made in
// microseconds, and a network has fewer layers. The thread's last one is found without the table, as `supports`, `workspace` and
// the convolution ask for the same.
constexpr size_t kPlans = 1024;
std::shared_ptr<const Plan> plan_of(const Conv2dProblem& p, cudnnConvolutionFwdAlgo_t method) {
  static auto& mutex = *new std::mutex;
  static auto& plans = *new std::map<Key, std::shared_ptr<const Plan>>;
  static thread_local std::pair<Key, std::shared_ptr<const Plan>> last;
  const int device = current_device();
  const Key key = key_of(p, method, device);
  if (last.second && last.first == key) return last.second;
  std::shared_ptr<const Plan> plan;
  {
    const std::lock_guard lock(mutex);
    if (const auto found = plans.find(key); found != plans.end()) plan = found->second;
  }
  if (!plan) {  // made without the lock; of two threads that make one, the first one's is kept
    plan = make_plan(p, key, method, handle_on(device));
    const std::lock_guard lock(mutex);
    if (plans.size() == kPlans) plans.clear();
    plan = plans.emplace(key, plan).first->second;
  }
  last = {key, plan};
  return plan;
}

}  // namespace

bool cudnn_supports(const Conv2dProblem& p, cudnnConvolutionFwdAlgo_t method, Reason& reason) {
  const int capability = current_capability();
  if (!supports_capability(capability, reason)) return false;
  if (capability == 0 || p.batch == 0 || !sizes_known(p)) return true;
  const auto plan = plan_of(p, method);
  return plan->refusal.empty() || refuse(reason, "%s", plan->refusal.c_str());
}

int64_t cudnn_workspace(const Conv2dProblem& p, cudnnConvolutionFwdAlgo_t method) {
  return p.batch == 0 ? 0 : workspace_bytes<char>(static_cast<int64_t>(plan_of(p, method)->workspace));
}

void cudnn_convolution(const Conv2dProblem& p, cudnnConvolutionFwdAlgo_t method, const void* x, const void* w, bool add, void* y,
                       Workspace& workspace) {
  const auto plan = plan_of(p, method);
  if (!plan->refusal.empty()) throw std::runtime_error(plan->refusal);
  const cudnnHandle_t handle = handle_on(current_device());
  check(cudnnSetStream(handle, stream_of(workspace)), "cudnnSetStream");
  void* scratch = plan->workspace ? workspace.take<char>(static_cast<int64_t>(plan->workspace)) : nullptr;
  const double one64 = 1, added64 = add;
  const float one32 = 1, added32 = add;
  const bool wide = p.dtype == DType::f64;
  check(
      cudnnConvolutionForward(handle, wide ? static_cast<const void*>(&one64) : &one32, plan->x, x, plan->w, w, plan->convolution,
                              method, scratch, plan->workspace, wide ? static_cast<const void*>(&added64) : &added32, plan->y, y),
      "cudnnConvolutionForward");
}

}  // namespace ai3::inline AI3_LEVEL
