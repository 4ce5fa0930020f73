// ai3::gelu_<algorithm>: both forms of ATen's.
#include "../algos/gelu/problem.h"
#include "elementwise.h"

namespace ai3::ops {
namespace {

// The problem's, by the name that ATen gives it.
int32_t form_of(const Entry& entry, const std::string& approximate) {
  check(approximate == "none" || approximate == "tanh", entry, "needs approximate 'none' or 'tanh', got '", approximate, "'");
  return approximate == "tanh";
}

void forward(const Entry& entry, StableIValue* stack) {
  Arguments in(stack);
  const Tensor input = in.take<Tensor>();
  const auto approximate = in.take<std::string>();
  const Given given{.parameters = in.take_parameters(entry)};
  give(stack, 0, map_elements(entry, input, given, form_of(entry, approximate)));
}
void infer(const Entry& entry, StableIValue* stack) {
  Arguments in(stack, true);
  const Tensor input = in.take<Tensor>();
  const int64_t form = in.take<int64_t>();
  const Given given{.parameters = in.take_parameters(entry)};
  check_inference(entry);
  give(stack, 0, map_elements(entry, input, given, static_cast<int32_t>(form)));
}
void forward_out(const Entry& entry, StableIValue* stack) {
  Arguments in(stack);
  const Tensor input = in.take<Tensor>();
  const auto approximate = in.take<std::string>();
  Given given{.out = in.take<Tensor>()};
  given.workspace = in.take<std::optional<Tensor>>(), given.parameters = in.take_parameters(entry);
  map_elements_out(entry, input, given, form_of(entry, approximate));
}

// A line of a program: gelu_<algorithm> %x approximate=tanh.
struct GeluStep final : program::ElementwiseStep {
  explicit GeluStep(program::Reader& r) : program::ElementwiseStep(r, form_of(*r.entry, r.line.word("approximate", "none"))) {}
};
AI3_STEPS(gelu, GeluStep)

constexpr OperatorKind kinds[] = {
    {"gelu_", "", "(Tensor input, *, str approximate=\"none\") -> Tensor", forward, nullptr},
    {"_gelu_", "_out", "(Tensor input, *, str approximate=\"none\", Tensor(a!) out, Tensor(b!)? workspace=None) -> ()",
     forward_out, nullptr},
    {"_gelu_", "_infer", "(Tensor input, int numbers) -> Tensor", infer, is_method<ElementwiseProblem>},
};
AI3_OPERATION(gelu, "count form", kinds, std::size(kinds), nullptr, 0, AI3_QUERIES(ElementwiseProblem, elementwise_from))

}  // namespace
}  // namespace ai3::ops
