// cuDNN's handles, one for each thread and device, and what is kept with them.
#pragma once
#include <array>
#include <map>

#include "cudnn_plan.h"
#include "host.h"

namespace ai3::inline AI3_LEVEL {

// A problem by value, as far as cuDNN's plan depends on it. `how` says the rest: the method or, of the graph interface, how
// memory is aligned, what is computed, and what is added to it.
using CudnnKey = std::array<int64_t, 28>;
CudnnKey cudnn_key(const Conv2dProblem& p, int64_t how, int device);
// Why cuDNN is not asked, empty where it is. The old interface's descriptors have 32 bits for each number; the graph interface's
// heuristic divides by zero and ends the process where sizes have more (seen in 9.19).
std::string too_large_for_cudnn(const CudnnKey& key);

struct CudnnHandle {
  int device;
  cudnnHandle_t handle;
  // Of the graph interface. cuDNN does not promise that two threads may run one plan at once: a handle's are its thread's own.
  std::map<CudnnKey, GraphPlan> plans = {};
};
// This thread's, of the current device.
CudnnHandle& cudnn_handle();

// While it lives, this thread may allocate memory although it captures a stream: what is made then is no part of the graph.
class RelaxedCapture {
 public:
  RelaxedCapture() { exchange(); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  void exchange() { check_cuda(cudaThreadExchangeStreamCaptureMode(&mode_), "cudaThreadExchangeStreamCaptureMode"); }
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace ai3::inline AI3_LEVEL
