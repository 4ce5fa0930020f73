// ai3::rms_norm_<algorithm>: its schemas; checks and the way from tensors to kernels are in row_norm.h.
#include "../algos/rms_norm/problem.h"
#include "row_norm.h"

namespace ai3::ops {
namespace {

using Rows = RowNorm<RmsNormProblem>;
RmsNormProblem problem_from(const Query& q) { return Rows::problem_from(q, "an rms_norm"); }
AI3_STEPS(rms_norm, Rows::Step)

constexpr OperatorKind kinds[] = {
    {"rms_norm_", "", "(Tensor input, int[] normalized_shape, Tensor? weight=None, float? eps=None) -> Tensor",
     Rows::forward<false>, nullptr},
    {"_rms_norm_", "_backward",
     "(Tensor grad_output, Tensor input, int[] normalized_shape, Tensor? weight, float eps, bool[2] output_mask) -> (Tensor, "
     "Tensor)",
     Rows::backward, Rows::has_gradients},
    {"_rms_norm_", "_out",
     "(Tensor input, int[] normalized_shape, Tensor? weight=None, float? eps=None, *, Tensor(a!) out, Tensor(b!)? "
     "workspace=None) -> ()",
     Rows::forward_out, nullptr},
    {"_rms_norm_", "_infer", "(Tensor input, Tensor? weight, int numbers) -> Tensor", Rows::forward<true>,
     is_method<RmsNormProblem>},
};
AI3_OPERATION(rms_norm, "rows features has_weight wide_weight", kinds, std::size(kinds), nullptr, 0,
              AI3_QUERIES(RmsNormProblem, problem_from))

}  // namespace
}  // namespace ai3::ops
