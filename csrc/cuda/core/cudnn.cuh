// Convolutions by cuDNN, the method named: handles, and plans that are kept. One file of conv2d for each method calls this;
// none of them has code for the device, so that the host's compiler reads them, in a tenth of nvcc's time.
#pragma once
#include <cudnn.h>

#include <vector>

#include "../../algos/conv2d/problem.h"
#include "../conv2d/gradients.cuh"

namespace ai3::inline AI3_LEVEL {

// False, with cuDNN's own words, for what it refuses. True where it cannot be asked: some sizes are unknown, or there is no GPU.
// Throws std::runtime_error, with its words, where the answer says that it was asked wrongly or is not in order.
bool cudnn_supports(const Conv2dProblem& p, cudnnConvolutionFwdAlgo_t method, Reason& reason);
// Bytes, a multiple of 256. Throws std::runtime_error where cuDNN cannot be asked.
int64_t cudnn_workspace(const Conv2dProblem& p, cudnnConvolutionFwdAlgo_t method);
// The methods that it has for the problem, those first that its heuristic expects to be fastest. As cudnn_workspace.
std::vector<cudnnConvolutionFwdAlgo_t> cudnn_ranked(const Conv2dProblem& p);
// Bytes of the weight as KRSC, 0 where it is read as it is; and what writes it. Of the implicit methods and the graph interface.
int64_t cudnn_packed_bytes(const Conv2dProblem& p);
void cudnn_pack(const Conv2dProblem& p, const Operand& weight, const Operand& packed, Workspace& workspace);
// The way back, of the weight's gradient.
void cudnn_unpack(const Conv2dProblem& p, const Operand& krsc, const Operand& weight, Workspace& workspace);
// The gradient of the bias: the sums of dY over images and pixels, in one order; and the workspace that it takes.
int64_t cudnn_sum_bias_bytes(const Conv2dProblem& p);
void cudnn_sum_bias(const Conv2dProblem& p, const Operand& grad_output, const Operand& grad_bias, Workspace& workspace);
// y = b everywhere.
void cudnn_spread_bias(const Conv2dProblem& p, const Conv2dOperands& operands, Workspace& workspace);
// y = x * w + b, b null for none, on the workspace's stream. Where cuDNN does not add the bias itself, the products are added
// onto it, so that half types round once. Throws std::runtime_error.
void cudnn_convolution(const Conv2dProblem& p, cudnnConvolutionFwdAlgo_t method, const Conv2dOperands& operands,
                       Workspace& workspace);

// The functions of the method's record. The kernels that they launch are compiled with cudnn_kernels.cu, once for all methods.
template <cudnnConvolutionFwdAlgo_t method>
struct Cudnn {
  static bool supports(const Conv2dProblem& p, Reason& reason) { return cudnn_supports(p, method, reason); }
  static int64_t workspace(const Conv2dProblem& p) { return cudnn_workspace(p, method); }
  static void run(const Conv2dProblem& p, const Conv2dOperands& operands, Workspace& workspace) {
    cudnn_convolution(p, method, operands, workspace);
  }
};

}  // namespace ai3::inline AI3_LEVEL
