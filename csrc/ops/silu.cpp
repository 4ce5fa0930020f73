#include "../algos/silu/problem.h"
#include "elementwise.h"

namespace ai3::ops {
namespace {

using SiluStep = program::ElementwiseStep;  // silu_<algorithm> %x
AI3_STEPS(silu, SiluStep)

constexpr OperatorKind kinds[] = {
    {"silu_", "", "(Tensor input) -> Tensor", map_forward<false>, nullptr},
    {"_silu_", "_out", "(Tensor input, *, Tensor(a!) out, Tensor(b!)? workspace=None) -> ()", map_forward_out, nullptr},
    {"_silu_", "_infer", "(Tensor input) -> Tensor", map_forward<true>, is_method<ElementwiseProblem>},
};
AI3_OPERATION(silu, "count", kinds, std::size(kinds), nullptr, 0, AI3_QUERIES(ElementwiseProblem, elementwise_from))

}  // namespace
}  // namespace ai3::ops
