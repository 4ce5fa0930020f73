// cuDNN's convolution on the host, as far as csrc/cuda calls it: by the definition, on what the descriptors say.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <vector>

#include "../../../csrc/algos/core/algorithm.h"
#include "cuda_runtime.h"

enum cudnnStatus_t : int {  // of which a newer cuDNN may have others
  CUDNN_STATUS_SUCCESS = 0,
  CUDNN_STATUS_NOT_INITIALIZED = 1001,
  CUDNN_STATUS_BAD_PARAM = 2000,
  CUDNN_STATUS_NOT_SUPPORTED = 3000,
  CUDNN_STATUS_NOT_SUPPORTED_LAYOUT = 3004,
  CUDNN_STATUS_NOT_SUPPORTED_SUBLIBRARY_UNAVAILABLE = 3009,
  CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED = 4004
};
enum cudnnDataType_t { CUDNN_DATA_FLOAT = 0, CUDNN_DATA_DOUBLE = 1, CUDNN_DATA_HALF = 2, CUDNN_DATA_BFLOAT16 = 9 };
enum cudnnMathType_t { CUDNN_DEFAULT_MATH = 0, CUDNN_TENSOR_OP_MATH = 1, CUDNN_FMA_MATH = 3 };
enum cudnnTensorFormat_t { CUDNN_TENSOR_NCHW = 0, CUDNN_TENSOR_NHWC = 1 };
enum cudnnConvolutionMode_t { CUDNN_CONVOLUTION = 0, CUDNN_CROSS_CORRELATION = 1 };
enum cudnnConvolutionFwdAlgo_t {
  CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_GEMM = 0,
  CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM = 1,
  CUDNN_CONVOLUTION_FWD_ALGO_GEMM = 2,
  CUDNN_CONVOLUTION_FWD_ALGO_FFT = 4,
  CUDNN_CONVOLUTION_FWD_ALGO_FFT_TILING = 5,
  CUDNN_CONVOLUTION_FWD_ALGO_WINOGRAD = 6,
  CUDNN_CONVOLUTION_FWD_ALGO_WINOGRAD_NONFUSED = 7,
  CUDNN_CONVOLUTION_FWD_ALGO_COUNT = 8
};
struct cudnnConvolutionFwdAlgoPerf_t {
  cudnnConvolutionFwdAlgo_t algo;
  cudnnStatus_t status;
};
enum cudnnActivationMode_t { CUDNN_ACTIVATION_RELU = 1, CUDNN_ACTIVATION_IDENTITY = 5 };
enum cudnnNanPropagation_t { CUDNN_NOT_PROPAGATE_NAN = 0, CUDNN_PROPAGATE_NAN = 1 };

namespace fake {
struct Dnn {
  int device;
  cudaStream_t stream;
  std::atomic<bool> busy;
};
struct DnnTensor {
  cudnnDataType_t type;
  int64_t size[4], stride[4];
};
struct DnnFilter {
  cudnnDataType_t type;
  cudnnTensorFormat_t format;
  int64_t size[4];
};
struct DnnActivation {
  cudnnActivationMode_t mode;
};
struct DnnConvolution {
  int64_t pad[2], stride[2], dilation[2], groups = 1;
  cudnnDataType_t compute;
  cudnnMathType_t math = CUDNN_DEFAULT_MATH;
};
// What tests set, and look at.
inline thread_local cudnnStatus_t dnn_answer = CUDNN_STATUS_SUCCESS;  // to the next queries for a workspace
inline thread_local cudaStream_t dnn_stream_used = nullptr;
inline thread_local int dnn_device_used = -1;
inline thread_local const Dnn* dnn_handle_used = nullptr;
inline thread_local cudnnMathType_t dnn_math_used = CUDNN_DEFAULT_MATH;
inline thread_local cudnnTensorFormat_t dnn_format_used = CUDNN_TENSOR_NCHW;
inline thread_local cudnnConvolutionFwdAlgo_t dnn_algorithm_used = CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_GEMM;
inline thread_local bool dnn_fuses_bias = true;
inline thread_local char dnn_message[128] = "";
inline thread_local std::vector<cudnnConvolutionFwdAlgoPerf_t> dnn_ranking;  // by the heuristic
inline std::atomic<int64_t> dnn_handles = 0, dnn_queries = 0, dnn_descriptors = 0;
constexpr size_t kDnnWorkspace = 100;

template <class D>
cudnnStatus_t make(D** descriptor) {
  *descriptor = new D();
  dnn_descriptors++;
  return CUDNN_STATUS_SUCCESS;
}
template <class D>
cudnnStatus_t destroy(D* descriptor) {
  delete descriptor;
  dnn_descriptors--;
  return CUDNN_STATUS_SUCCESS;
}
inline bool is_nchw(const DnnTensor& t) {
  int64_t want = 1;
  for (int d = 3; d >= 0; want *= t.size[d], d--)
    if (t.stride[d] != want && t.size[d] != 1) return false;
  return true;
}
inline cudnnStatus_t dnn_fail(cudnnStatus_t status, const char* message) {
  std::snprintf(dnn_message, sizeof(dnn_message), "%s", message);
  return status;
}
}  // namespace fake
using cudnnHandle_t = fake::Dnn*;
using cudnnTensorDescriptor_t = fake::DnnTensor*;
using cudnnFilterDescriptor_t = fake::DnnFilter*;
using cudnnConvolutionDescriptor_t = fake::DnnConvolution*;
using cudnnActivationDescriptor_t = fake::DnnActivation*;

inline const char* cudnnGetErrorString(cudnnStatus_t s) {
  return s == CUDNN_STATUS_SUCCESS                                ? "CUDNN_STATUS_SUCCESS"
         : s == CUDNN_STATUS_NOT_INITIALIZED                      ? "CUDNN_STATUS_NOT_INITIALIZED"
         : s == CUDNN_STATUS_BAD_PARAM                            ? "CUDNN_STATUS_BAD_PARAM"
         : s == CUDNN_STATUS_NOT_SUPPORTED                        ? "CUDNN_STATUS_NOT_SUPPORTED"
         : s == CUDNN_STATUS_NOT_SUPPORTED_LAYOUT                 ? "CUDNN_STATUS_NOT_SUPPORTED_LAYOUT"
         : s == CUDNN_STATUS_NOT_SUPPORTED_SUBLIBRARY_UNAVAILABLE ? "CUDNN_STATUS_NOT_SUPPORTED_SUBLIBRARY_UNAVAILABLE"
                                                                  : "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED";
}
inline void cudnnGetLastErrorString(char* message, size_t size) {
  std::snprintf(message, size, "%s", fake::dnn_message);
  *fake::dnn_message = '\0';
}
inline cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
  if (!fake::capability || fake::forbidden()) return CUDNN_STATUS_NOT_INITIALIZED;
  fake::dnn_handles++;
  *handle = new fake::Dnn{fake::device, nullptr, false};
  return CUDNN_STATUS_SUCCESS;
}
inline cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  return CUDNN_STATUS_SUCCESS;
}
inline cudnnStatus_t cudnnCreateTensorDescriptor(cudnnTensorDescriptor_t* d) { return fake::make(d); }
inline cudnnStatus_t cudnnDestroyTensorDescriptor(cudnnTensorDescriptor_t d) { return fake::destroy(d); }
inline cudnnStatus_t cudnnCreateFilterDescriptor(cudnnFilterDescriptor_t* d) { return fake::make(d); }
inline cudnnStatus_t cudnnDestroyFilterDescriptor(cudnnFilterDescriptor_t d) { return fake::destroy(d); }
inline cudnnStatus_t cudnnCreateConvolutionDescriptor(cudnnConvolutionDescriptor_t* d) { return fake::make(d); }
inline cudnnStatus_t cudnnDestroyConvolutionDescriptor(cudnnConvolutionDescriptor_t d) { return fake::destroy(d); }
inline cudnnStatus_t cudnnCreateActivationDescriptor(cudnnActivationDescriptor_t* d) { return fake::make(d); }
inline cudnnStatus_t cudnnDestroyActivationDescriptor(cudnnActivationDescriptor_t d) { return fake::destroy(d); }
inline cudnnStatus_t cudnnSetActivationDescriptor(cudnnActivationDescriptor_t d, cudnnActivationMode_t mode,
                                                  cudnnNanPropagation_t, double) {
  *d = {mode};
  return CUDNN_STATUS_SUCCESS;
}
inline cudnnStatus_t cudnnSetTensor4dDescriptorEx(cudnnTensorDescriptor_t d, cudnnDataType_t type, int n, int c, int h, int w,
                                                  int n_stride, int c_stride, int h_stride, int w_stride) {
  *d = {type, {n, c, h, w}, {n_stride, c_stride, h_stride, w_stride}};
  for (int64_t size : d->size)
    if (size < 1) return fake::dnn_fail(CUDNN_STATUS_BAD_PARAM, "a size below 1");
  return CUDNN_STATUS_SUCCESS;
}
inline cudnnStatus_t cudnnSetFilter4dDescriptor(cudnnFilterDescriptor_t d, cudnnDataType_t type, cudnnTensorFormat_t format,
                                                int k, int c, int h, int w) {
  *d = {type, format, {k, c, h, w}};
  return CUDNN_STATUS_SUCCESS;
}
inline cudnnStatus_t cudnnSetConvolution2dDescriptor(cudnnConvolutionDescriptor_t d, int pad_h, int pad_w, int u, int v,
                                                     int dilation_h, int dilation_w, cudnnConvolutionMode_t mode,
                                                     cudnnDataType_t compute) {
  *d = {{pad_h, pad_w}, {u, v}, {dilation_h, dilation_w}, 1, compute, CUDNN_DEFAULT_MATH};
  return mode == CUDNN_CROSS_CORRELATION ? CUDNN_STATUS_SUCCESS : fake::dnn_fail(CUDNN_STATUS_NOT_SUPPORTED, "another mode");
}
inline cudnnStatus_t cudnnSetConvolutionGroupCount(cudnnConvolutionDescriptor_t d, int groups) {
  d->groups = groups;
  return CUDNN_STATUS_SUCCESS;
}
inline cudnnStatus_t cudnnSetConvolutionMathType(cudnnConvolutionDescriptor_t d, cudnnMathType_t math) {
  d->math = math;
  return CUDNN_STATUS_SUCCESS;
}
inline cudnnStatus_t cudnnGetConvolutionForwardWorkspaceSize(cudnnHandle_t handle, cudnnTensorDescriptor_t x,
                                                             cudnnFilterDescriptor_t w, cudnnConvolutionDescriptor_t c,
                                                             cudnnTensorDescriptor_t y, cudnnConvolutionFwdAlgo_t algo,
                                                             size_t* bytes) {
  fake::dnn_queries++;
  if (fake::dnn_answer) return fake::dnn_fail(fake::dnn_answer, "for a test");
  const cudnnDataType_t compute = x->type == CUDNN_DATA_DOUBLE ? CUDNN_DATA_DOUBLE : CUDNN_DATA_FLOAT;
  bool ok = handle->device == fake::device && x->type == y->type && x->type == w->type && c->compute == compute &&
            y->size[0] == x->size[0] && y->size[1] == w->size[0] && x->size[1] == w->size[1] * c->groups;
  for (int d : {0, 1})
    ok &= y->size[d + 2] == (x->size[d + 2] + 2 * c->pad[d] - c->dilation[d] * (w->size[d + 2] - 1) - 1) / c->stride[d] + 1;
  *bytes = fake::kDnnWorkspace;
  const bool nchw = fake::is_nchw(*x) && fake::is_nchw(*y), three = w->size[2] == 3 && w->size[3] == 3;
  const bool dense = c->dilation[0] == 1 && c->dilation[1] == 1, plain = dense && c->stride[0] == 1 && c->stride[1] == 1;
  if (w->format == CUDNN_TENSOR_NHWC &&
      (algo > CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM || x->stride[1] != 1 || y->stride[1] != 1))
    return fake::dnn_fail(CUDNN_STATUS_NOT_SUPPORTED_LAYOUT, "this filter");
  if ((algo == CUDNN_CONVOLUTION_FWD_ALGO_FFT || algo == CUDNN_CONVOLUTION_FWD_ALGO_FFT_TILING) && (!nchw || !plain))
    return fake::dnn_fail(CUDNN_STATUS_NOT_SUPPORTED, "no FFT of these");
  if ((algo == CUDNN_CONVOLUTION_FWD_ALGO_WINOGRAD || algo == CUDNN_CONVOLUTION_FWD_ALGO_WINOGRAD_NONFUSED) && (!plain || !three))
    return fake::dnn_fail(CUDNN_STATUS_NOT_SUPPORTED, "no Winograd of these");
  return ok ? CUDNN_STATUS_SUCCESS : fake::dnn_fail(CUDNN_STATUS_BAD_PARAM, "descriptors of another problem");
}
inline cudnnStatus_t cudnnGetConvolutionForwardAlgorithm_v7(cudnnHandle_t handle, cudnnTensorDescriptor_t x,
                                                            cudnnFilterDescriptor_t w, cudnnConvolutionDescriptor_t c,
                                                            cudnnTensorDescriptor_t y, int most, int* count,
                                                            cudnnConvolutionFwdAlgoPerf_t* found) {
  if (handle->device != fake::device || x->type != y->type || x->size[1] != w->size[1] * c->groups)
    return fake::dnn_fail(CUDNN_STATUS_BAD_PARAM, "descriptors of another problem");
  *count = std::min(most, static_cast<int>(fake::dnn_ranking.size()));
  std::copy_n(fake::dnn_ranking.begin(), *count, found);
  return CUDNN_STATUS_SUCCESS;
}
namespace fake {
inline ai3::DType dtype_of(cudnnDataType_t type) {
  return type == CUDNN_DATA_DOUBLE  ? ai3::DType::f64
         : type == CUDNN_DATA_FLOAT ? ai3::DType::f32
         : type == CUDNN_DATA_HALF  ? ai3::DType::f16
                                    : ai3::DType::bf16;
}
// What every call needs of its handle and workspace; notes what it used. Until it returns the handle is `busy`.
inline cudnnStatus_t dnn_begin(cudnnHandle_t handle, const DnnFilter& w, const DnnConvolution& c, void* workspace,
                               size_t workspace_bytes) {
  if (handle->busy.exchange(true) || handle->device != fake::device || workspace_bytes < fake::kDnnWorkspace ||
      reinterpret_cast<uintptr_t>(workspace) % 256 != 0)
    return fake::dnn_fail(CUDNN_STATUS_BAD_PARAM, "the handle of another thread or device, or too little workspace");
  std::memset(workspace, 0xff, workspace_bytes);
  fake::dnn_format_used = w.format, fake::dnn_stream_used = handle->stream, fake::dnn_device_used = handle->device,
  fake::dnn_handle_used = handle, fake::dnn_math_used = c.math;
  return CUDNN_STATUS_SUCCESS;
}
// alpha conv(x, w) + beta y + residual + b, less what is below 0 with `relu`.
inline cudnnStatus_t dnn_convolve(cudnnHandle_t handle, const void* alpha, cudnnTensorDescriptor_t x, const void* xs,
                                  cudnnFilterDescriptor_t w, const void* ws, cudnnConvolutionDescriptor_t c,
                                  cudnnConvolutionFwdAlgo_t algorithm, void* workspace, size_t workspace_bytes, const void* beta,
                                  const void* bias, cudnnTensorDescriptor_t y, void* ys, const void* residual = nullptr,
                                  bool relu = false) {
  if (const cudnnStatus_t status = dnn_begin(handle, *w, *c, workspace, workspace_bytes)) return status;
  fake::dnn_algorithm_used = algorithm;
  ai3::with_type(dtype_of(x->type), [&]<class T>() {
    using A = ai3::Acc<T>;
    const A scale = *static_cast<const A*>(alpha), kept = *static_cast<const A*>(beta);
    const int64_t kernels = w->size[0] / c->groups;
    for (int64_t n = 0; n < y->size[0]; n++)
      for (int64_t k = 0; k < y->size[1]; k++)
        for (int64_t i = 0; i < y->size[2]; i++)
          for (int64_t j = 0; j < y->size[3]; j++) {
            A sum = 0;
            for (int64_t d = 0; d < w->size[1]; d++)
              for (int64_t r = 0; r < w->size[2]; r++)
                for (int64_t s = 0; s < w->size[3]; s++) {
                  const int64_t h = i * c->stride[0] - c->pad[0] + r * c->dilation[0],
                                v = j * c->stride[1] - c->pad[1] + s * c->dilation[1];
                  if (h < 0 || h >= x->size[2] || v < 0 || v >= x->size[3]) continue;
                  sum += ai3::widen(static_cast<const T*>(xs)[n * x->stride[0] + (k / kernels * w->size[1] + d) * x->stride[1] +
                                                              h * x->stride[2] + v * x->stride[3]]) *
                         ai3::widen(static_cast<const T*>(
                             ws)[w->format == CUDNN_TENSOR_NCHW ? ((k * w->size[1] + d) * w->size[2] + r) * w->size[3] + s
                                                                : ((k * w->size[2] + r) * w->size[3] + s) * w->size[1] + d]);
                }
            const int64_t at = n * y->stride[0] + k * y->stride[1] + i * y->stride[2] + j * y->stride[3];
            T& out = static_cast<T*>(ys)[at];
            A added = bias ? ai3::widen(static_cast<const T*>(bias)[k]) : A(0);
            if (residual) added += ai3::widen(static_cast<const T*>(residual)[at]);
            const A value = scale * sum + added + (kept == 0 ? A(0) : kept * ai3::widen(out));
            out = ai3::narrowed<T>(relu && value < 0 ? A(0) : value);
          }
  });
  handle->busy = false;
  return CUDNN_STATUS_SUCCESS;
}
}  // namespace fake
inline cudnnStatus_t cudnnConvolutionForward(cudnnHandle_t handle, const void* alpha, cudnnTensorDescriptor_t x, const void* xs,
                                             cudnnFilterDescriptor_t w, const void* ws, cudnnConvolutionDescriptor_t c,
                                             cudnnConvolutionFwdAlgo_t algorithm, void* workspace, size_t workspace_bytes,
                                             const void* beta, cudnnTensorDescriptor_t y, void* ys) {
  return fake::dnn_convolve(handle, alpha, x, xs, w, ws, c, algorithm, workspace, workspace_bytes, beta, nullptr, y, ys);
}
inline cudnnStatus_t cudnnConvolutionBiasActivationForward(cudnnHandle_t handle, const void* alpha, cudnnTensorDescriptor_t x,
                                                           const void* xs, cudnnFilterDescriptor_t w, const void* ws,
                                                           cudnnConvolutionDescriptor_t c, cudnnConvolutionFwdAlgo_t algorithm,
                                                           void* workspace, size_t workspace_bytes, const void* alpha_z,
                                                           cudnnTensorDescriptor_t, const void*, cudnnTensorDescriptor_t b,
                                                           const void* bias, cudnnActivationDescriptor_t activation,
                                                           cudnnTensorDescriptor_t y, void* ys) {
  if (activation->mode != CUDNN_ACTIVATION_IDENTITY || algorithm != CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM ||
      b->size[1] != y->size[1] || b->type != y->type)
    return fake::dnn_fail(CUDNN_STATUS_BAD_PARAM, "this epilogue");
  if (!fake::dnn_fuses_bias) return fake::dnn_fail(CUDNN_STATUS_NOT_SUPPORTED, "this epilogue");
  return fake::dnn_convolve(handle, alpha, x, xs, w, ws, c, algorithm, workspace, workspace_bytes, alpha_z, bias, y, ys);
}

#include "cudnn_backend.h"
