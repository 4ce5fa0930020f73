#include "../algos/relu/problem.h"
#include "elementwise.h"

namespace ai3::ops {
namespace {

constexpr OperatorKind kinds[] = {
    {"relu_", "", "(Tensor input) -> Tensor", map_forward<false>, nullptr},
    {"_relu_", "_out", "(Tensor input, *, Tensor(a!) out, Tensor(b!)? workspace=None) -> ()", map_forward_out, nullptr},
    {"_relu_", "_infer", "(Tensor input) -> Tensor", map_forward<true>, is_method<ElementwiseProblem>},
};
AI3_OPERATION(relu, "count", kinds, std::size(kinds), nullptr, 0, AI3_QUERIES(ElementwiseProblem, elementwise_from))

}  // namespace
}  // namespace ai3::ops
