// What the 2-D poolings share: windows, output sizes and the way from tensors to kernels.
#pragma once
#include "../algos/core/pool_problem.h"
#include "prepare/run.h"
#include "program/step.h"

namespace ai3::ops {

struct Pool2dCall {
  Tensor input;
  Sizes kernel, stride, padding, dilation;  // empty stride: the kernel's size
  bool ceil_mode = false, count_include_pad = true;
  std::optional<int64_t> divisor = {};
};

// Checks the arguments as ATen does and runs the algorithm; the result is written to `out` where one is given.
Tensor pool2d_run(const Entry& asked, Pool2dCall& call, const Given& given);
// The same for windows that follow from the sizes.
Tensor adaptive_pool2d_run(const Entry& asked, const Tensor& input, Sizes output_size, const Given& given);

// A line of a program: <pooling>_<algorithm> %x kernel_size=2,2 stride=2,2 padding=0,0 dilation=1,1 ceil_mode=0, or
// output_size=1,1.
struct PoolStep : program::Step {
  PoolStep(program::Reader& r, bool adaptive);
  void emit(program::Emitter& e) override;
  Pool2dProblem p;
  const Entry& entry;
  bool reads_slices;
};
struct WindowStep final : PoolStep {
  explicit WindowStep(program::Reader& r) : PoolStep(r, false) {}
};
struct AdaptiveStep final : PoolStep {
  explicit AdaptiveStep(program::Reader& r) : PoolStep(r, true) {}
};

// The ways to call a pooling: the operator itself, _out, _infer. `run(entry, arguments, take_rest)` takes its arguments, then
// calls take_rest, which returns what the caller gave.
enum class Form { plain, out, inference };
template <Form form, auto run>
void pooling(const Entry& entry, StableIValue* stack) {
  Arguments in(stack, form == Form::inference);
  const Tensor output = run(entry, in, [&]() -> Given {
    Given given;
    if (form == Form::out) given.out = in.take<Tensor>(), given.workspace = in.take<std::optional<Tensor>>();
    given.parameters = in.take_parameters(entry);
    if (form == Form::inference) check_inference(entry);
    if (given.out) mark_written(entry, *given.out);
    return given;
  });
  if (form != Form::out) give(stack, 0, output);
}
// The table of its operators, `kinds`; `arguments` are those of the schema.
#define AI3_POOLING_OPERATORS(operation, run, arguments)                                                    \
  constexpr OperatorKind kinds[] = {                                                                        \
      {operation "_", "", "(" arguments ") -> Tensor", pooling<Form::plain, run>, nullptr},                 \
      {"_" operation "_", "_out", "(" arguments ", *, Tensor(a!) out, Tensor(b!)? workspace=None) -> ()",   \
       pooling<Form::out, run>, nullptr},                                                                   \
      {"_" operation "_", "_infer", "(Tensor input, int numbers) -> Tensor", pooling<Form::inference, run>, \
       is_method<Pool2dProblem>},                                                                           \
  };

#define AI3_POOL2D_SIZES                                                                                              \
  "batch channels in_height in_width kernel_height kernel_width stride_h stride_w pad_h pad_w dilation_h dilation_w " \
  "ceil_mode count_include_pad divisor channels_last"
Pool2dProblem pool2d_from(const Query& q);
Pool2dProblem adaptive_pool2d_from(const Query& q);

}  // namespace ai3::ops
