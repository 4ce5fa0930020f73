// ai3::layer_norm_<algorithm>: its schemas; checks and the way from tensors to kernels are in row_norm.h.
#include "../algos/layer_norm/problem.h"
#include "row_norm.h"

namespace ai3::ops {
namespace {

using Rows = RowNorm<LayerNormProblem>;
LayerNormProblem problem_from(const Query& q) { return Rows::problem_from(q, "a layer_norm"); }
AI3_STEPS(layer_norm, Rows::Step)

constexpr OperatorKind kinds[] = {
    {"layer_norm_", "",
     "(Tensor input, int[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float eps=1e-05) -> Tensor",
     Rows::forward<false>, nullptr},
    {"_layer_norm_", "_backward",
     "(Tensor grad_output, Tensor input, int[] normalized_shape, Tensor? weight, float eps, bool[3] output_mask) -> (Tensor, "
     "Tensor, Tensor)",
     Rows::backward, Rows::has_gradients},
    {"_layer_norm_", "_out",
     "(Tensor input, int[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float eps=1e-05, *, Tensor(a!) out, "
     "Tensor(b!)? workspace=None) -> ()",
     Rows::forward_out, nullptr},
    {"_layer_norm_", "_infer", "(Tensor input, Tensor? weight, Tensor? bias, int numbers) -> Tensor", Rows::forward<true>,
     is_method<LayerNormProblem>},
};
AI3_OPERATION(layer_norm, "rows features has_weight has_bias wide_weight", kinds, std::size(kinds), nullptr, 0,
              AI3_QUERIES(LayerNormProblem, problem_from))

}  // namespace
}  // namespace ai3::ops
