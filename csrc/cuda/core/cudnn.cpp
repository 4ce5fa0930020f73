#include "cudnn.cuh"

#include <algorithm>
#include <list>
#include <memory>
#include <mutex>

#include "cudnn_handle.h"

namespace ai3::inline AI3_LEVEL {
namespace {

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
    idle().splice(idle().begin(), mine_);  // to be found first: what was used last has the plans of what runs now
  }
  CudnnHandle& on(int device) {
    auto of_device = [&](const auto& handle) { return handle.device == device; };
    if (const auto found = std::find_if(mine_.begin(), mine_.end(), of_device); found != mine_.end()) return *found;
    {
      const std::lock_guard lock(mutex());
      if (const auto found = std::find_if(idle().begin(), idle().end(), of_device); found != idle().end()) {
        mine_.splice(mine_.end(), idle(), found);
        return mine_.back();
      }
    }
    cudnnHandle_t handle = nullptr;
    const RelaxedCapture relaxed;
    check_cudnn(cudnnCreate(&handle), "cudnnCreate");
    return mine_.emplace_back(CudnnHandle{device, handle});
  }

 private:
  using List = std::list<CudnnHandle>;  // whose elements stay where they are
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

// A descriptor that is destroyed with its owner.
template <class D, cudnnStatus_t (*create)(D*), cudnnStatus_t (*destroy)(D)>
class Descriptor {
 public:
  Descriptor() { check_cudnn(create(&descriptor_), "a cuDNN descriptor"); }
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
using ActivationDescriptor =
    Descriptor<cudnnActivationDescriptor_t, cudnnCreateActivationDescriptor, cudnnDestroyActivationDescriptor>;

// What is asked of cuDNN once for each problem. Nothing changes in it afterwards, so threads share it.
struct Plan {
  TensorDescriptor x, y, b;
  FilterDescriptor w;
  ConvolutionDescriptor convolution;
  ActivationDescriptor identity;
  size_t workspace = 0;
  std::string refusal;  // empty: supported
};

// Sets the descriptors and asks for the workspace.
cudnnStatus_t ask(const Conv2dProblem& p, cudnnConvolutionFwdAlgo_t method, cudnnHandle_t handle, Plan& plan) {
  const cudnnDataType_t type = cudnn_type(p.dtype);
  // Tensor cores multiply half types exactly; float32 they would round to TF32.
  const cudnnMathType_t math = size_of(p.dtype) == 2                    ? CUDNN_TENSOR_OP_MATH
                               : p.dtype == DType::f32 && !p.allow_tf32 ? CUDNN_FMA_MATH
                                                                        : CUDNN_DEFAULT_MATH;
  const bool implicit =
      method == CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_GEMM || method == CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM;
  auto to = [](int64_t value) { return static_cast<int>(value); };
  auto tensor = [&](cudnnTensorDescriptor_t t, int64_t channels, int64_t height, int64_t width, const Strides4& s) {
    return cudnnSetTensor4dDescriptorEx(t, type, to(p.batch), to(channels), to(height), to(width), to(s.n), to(s.c), to(s.h),
                                        to(s.w));
  };
  cudnnStatus_t status = tensor(plan.x, p.in_channels, p.in_height, p.in_width, p.x_stride);
  if (!status) status = tensor(plan.y, p.out_channels, p.out_height, p.out_width, p.y_stride);
  if (!status) status = cudnnSetTensor4dDescriptorEx(plan.b, type, 1, to(p.out_channels), 1, 1, to(p.out_channels), 1, 1, 1);
  if (!status) status = cudnnSetActivationDescriptor(plan.identity, CUDNN_ACTIVATION_IDENTITY, CUDNN_PROPAGATE_NAN, 0);
  if (!status)
    status =
        cudnnSetFilter4dDescriptor(plan.w, type, implicit && reads_krsc(p) ? CUDNN_TENSOR_NHWC : CUDNN_TENSOR_NCHW,
                                   to(p.out_channels), to(p.in_channels / p.groups), to(p.kernel_height), to(p.kernel_width));
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

std::shared_ptr<const Plan> make_plan(const Conv2dProblem& p, const CudnnKey& key, cudnnConvolutionFwdAlgo_t method,
                                      cudnnHandle_t handle) {
  auto plan = std::make_shared<Plan>();
  if (plan->refusal = too_large_for_cudnn(key); !plan->refusal.empty()) return plan;
  const cudnnStatus_t status = ask(p, method, handle, *plan);
  if (is_refusal(status))
    plan->refusal = "cuDNN refuses: " + words_of(status);
  else
    check_cudnn(status, "cudnnGetConvolutionForwardWorkspaceSize");  // such as memory that is missing now: nothing to keep
  return plan;
}

// The plan of a problem, from the tables of all threads or made for it. Of many tables a call locks one, so that threads seldom
// meet; one that is full is emptied: a plan is made in microseconds, and a network has fewer layers than the tables hold.
struct alignas(64) Table {
  std::mutex mutex;
  std::map<CudnnKey, std::shared_ptr<const Plan>> plans;
};
constexpr size_t kTables = 64, kPlansInTable = 16;
std::shared_ptr<const Plan> plan_of(const Conv2dProblem& p, cudnnConvolutionFwdAlgo_t method) {
  static auto& tables = *new std::array<Table, kTables>;
  const int device = current_device();
  const CudnnKey key = cudnn_key(p, method, device);
  uint64_t hash = 0;
  for (const int64_t number : key) hash = (hash ^ static_cast<uint64_t>(number)) * 0x9e3779b97f4a7c15u, hash ^= hash >> 32;
  Table& table = tables[hash % kTables];
  {
    const std::lock_guard lock(table.mutex);
    if (const auto found = table.plans.find(key); found != table.plans.end()) return found->second;
  }
  // Made without the lock; of two threads that make one, the first one's is kept.
  std::shared_ptr<const Plan> plan = make_plan(p, key, method, cudnn_handle().handle);
  const std::lock_guard lock(table.mutex);
  if (table.plans.size() == kPlansInTable) table.plans.clear();
  return table.plans.emplace(key, std::move(plan)).first->second;
}

}  // namespace

CudnnKey cudnn_key(const Conv2dProblem& p, int64_t how, int device) {
  return {device,
          how,
          static_cast<int64_t>(p.dtype),
          p.allow_tf32,
          p.batch,
          p.in_channels,
          p.in_height,
          p.in_width,
          p.out_channels,
          p.kernel_height,
          p.kernel_width,
          p.out_height,
          p.out_width,
          p.stride_h,
          p.stride_w,
          p.pad_h,
          p.pad_w,
          p.dilation_h,
          p.dilation_w,
          p.groups,
          p.x_stride.n,
          p.x_stride.c,
          p.x_stride.h,
          p.x_stride.w,
          p.y_stride.n,
          p.y_stride.c,
          p.y_stride.h,
          p.y_stride.w};
}

std::string too_large_for_cudnn(const CudnnKey& key) {
  const int64_t largest = *std::max_element(key.begin(), key.end());
  return largest > INT32_MAX ? "cuDNN takes sizes and strides below 2147483648, got " + std::to_string(largest) : "";
}

CudnnHandle& cudnn_handle() {
  static thread_local Handles handles;
  return handles.on(current_device());
}

bool cudnn_supports(const Conv2dProblem& p, cudnnConvolutionFwdAlgo_t method, Reason& reason) {
  const int capability = current_capability();
  if (!supports_capability(capability, reason)) return false;
  // Seen on a GPU: these methods' sums of 16 bits are rounded before they are added onto what y holds.
  const bool rounds_early = method == CUDNN_CONVOLUTION_FWD_ALGO_GEMM || method == CUDNN_CONVOLUTION_FWD_ALGO_FFT ||
                            method == CUDNN_CONVOLUTION_FWD_ALGO_FFT_TILING;
  if (rounds_early && p.has_bias && size_of(p.dtype) == 2)
    return refuse(reason, "needs no bias in 16 bits, where cuDNN's method would round before it is added");
  if (capability == 0 || p.batch == 0 || !sizes_known(p)) return true;
  const auto plan = plan_of(p, method);
  return plan->refusal.empty() || refuse(reason, "%s", plan->refusal.c_str());
}

int64_t cudnn_workspace(const Conv2dProblem& p, cudnnConvolutionFwdAlgo_t method) {
  return p.batch == 0 ? 0 : piece_bytes<char>(static_cast<int64_t>(plan_of(p, method)->workspace));
}

std::vector<cudnnConvolutionFwdAlgo_t> cudnn_ranked(const Conv2dProblem& p) {
  const auto plan = plan_of(p, CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_GEMM);  // a filter as KRSC where it reads that
  if (!plan->refusal.empty()) return {};
  cudnnConvolutionFwdAlgoPerf_t all[2 * CUDNN_CONVOLUTION_FWD_ALGO_COUNT];  // a method may have two kinds of arithmetic
  int count = 0;
  const RelaxedCapture relaxed;
  const cudnnStatus_t status = cudnnGetConvolutionForwardAlgorithm_v7(cudnn_handle().handle, plan->x, plan->w, plan->convolution,
                                                                      plan->y, static_cast<int>(std::size(all)), &count, all);
  if (is_refusal(status)) return {};
  check_cudnn(status, "cudnnGetConvolutionForwardAlgorithm_v7");
  std::vector<cudnnConvolutionFwdAlgo_t> ranked;
  for (int i = 0; i < count; i++)
    if (all[i].status == CUDNN_STATUS_SUCCESS) ranked.push_back(all[i].algo);
  return ranked;
}

int64_t cudnn_packed_bytes(const Conv2dProblem& p) {
  if (!reads_krsc(p)) return 0;
  return piece_bytes<char>(
      checked_product({p.out_channels, p.in_channels / p.groups, p.kernel_height, p.kernel_width, size_of(p.dtype)}));
}

void cudnn_convolution(const Conv2dProblem& p, cudnnConvolutionFwdAlgo_t method, const Conv2dOperands& operands,
                       Workspace& workspace) {
  const void *x = operands.input.data, *w = operands.weight.data, *b = operands.bias.data;
  void* y = operands.output.data;
  const auto plan = plan_of(p, method);
  if (!plan->refusal.empty()) throw std::runtime_error(plan->refusal);
  const cudnnHandle_t handle = cudnn_handle().handle;
  check_cudnn(cudnnSetStream(handle, stream_of(workspace)), "cudnnSetStream");
  void* scratch = plan->workspace ? take<char>(workspace, static_cast<int64_t>(plan->workspace)) : nullptr;
  const double one64 = 1, zero64 = 0;
  const float one32 = 1, zero32 = 0;
  const bool wide = p.dtype == DType::f64;
  const void *one = wide ? static_cast<const void*>(&one64) : &one32, *zero = wide ? static_cast<const void*>(&zero64) : &zero32;
  if (b && method == CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM) {  // the one method whose store adds a bias alone
    const cudnnStatus_t status =
        cudnnConvolutionBiasActivationForward(handle, one, plan->x, x, plan->w, w, plan->convolution, method, scratch,
                                              plan->workspace, zero, plan->y, y, plan->b, b, plan->identity, plan->y, y);
    if (!is_refusal(status)) return check_cudnn(status, "cudnnConvolutionBiasActivationForward");
  }
  if (b) cudnn_spread_bias(p, operands, workspace);
  check_cudnn(cudnnConvolutionForward(handle, one, plan->x, x, plan->w, w, plan->convolution, method, scratch, plan->workspace,
                                      b ? one : zero, plan->y, y),
              "cudnnConvolutionForward");
}

}  // namespace ai3::inline AI3_LEVEL
