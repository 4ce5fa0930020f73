// ai3::conv1d_<algorithm>: schema, checks, and the way to conv2d's glue: sequences are images of height 1.
#include "../algos/conv1d/problem.h"
#include "conv2d.h"

namespace ai3::ops {
namespace {

struct Conv1dCall : Conv2dCall {
  void take_window(Arguments& in) {
    stride = in.take_list(1), padding = in.take_list(1), dilation = in.take_list(1), groups = in.take<int64_t>();
  }
  void take_prologue(Arguments&) {}  // its packed operators have none
};

// (..., C, L) as (..., C, 1, L), contiguous, so that conv2d's output is, too.
Tensor as_image(const Tensor& t) { return torch::stable::unsqueeze(as_contiguous(t), t.dim() - 1); }
Tensor as_sequence(const Tensor& t) { return torch::stable::squeeze(t, t.dim() - 2); }

void widen_window(const Entry& entry, Conv1dCall& c) {
  auto widen = [&](Sizes& list, const char* name, int64_t of_height) {
    spread(entry, list, 1, name), check_each(entry, list, name[0] == 'p' ? 0 : 1, name);
    list.insert(list.begin(), of_height);
  };
  widen(c.stride, "stride", 1), widen(c.padding, "padding", 0), widen(c.dilation, "dilation", 1);
}
void widen_weight(const Entry& entry, Conv1dCall& c) {
  check(c.weight.defined(), entry, "needs tensors as input and weight, got None");
  check(c.weight.dim() == 3, entry, "needs a 3-D weight (out_channels, in_channels/groups, kernel_length), got ", c.weight);
  check(c.groups > 0, entry, "needs groups of at least 1, got ", c.groups);
  const Tensor image = torch::stable::unsqueeze(c.weight, 2);  // the same memory, by which kept packs know it
  c.weight = suggests_channels_last(image) && !c.is_sequence ? as_image(c.weight) : image;
}
// (K, C/groups, 1, L), once widened.
Sizes weight_sizes(const Conv1dCall& c) { return c.weight_size.empty() ? sizes_of(c.weight) : c.weight_size; }
// A residual, output or gradient as an image, its sizes checked in the dimensions that the caller knows: those of the output of
// c, which is widened but for this one.
void widen_output(const Entry& entry, Conv1dCall c, Tensor& t, const char* needs) {
  const Conv2dProblem p = conv2d_problem(entry, c, weight_sizes(c));
  const Sizes sizes = c.unbatched ? Sizes{p.out_channels, p.out_width} : Sizes{p.batch, p.out_channels, p.out_width};
  check(sizes_of(t) == sizes, entry, needs, sizes, ", got ", t);
  t = torch::stable::unsqueeze(t, t.dim() - 1);
}
// The call as one of conv2d.
void widen(const Entry& entry, Conv1dCall& c) {
  check(c.input.defined(), entry, "needs tensors as input and weight, got None");
  check(c.input.dim() == 2 || c.input.dim() == 3, entry, "needs input (N, C, L) or (C, L), got ", c.input);
  widen_window(entry, c);
  if (c.weight_size.empty())
    widen_weight(entry, c);
  else
    c.weight_size.insert(c.weight_size.begin() + 2, 1);
  const int64_t channels = checked_mul(c.weight_size.empty() ? c.weight.size(1) : c.weight_size[1], c.groups);
  if (c.groups > 0 && c.input.size(c.input.dim() - 2) != channels) {
    Sizes weight = weight_sizes(c);
    weight.erase(weight.begin() + 2);
    fail(entry, "needs input of ", channels, " channels for weight ", weight, " and groups ", c.groups, ", got ", c.input);
  }
  c.input = as_image(c.input);
  if (c.residual) widen_output(entry, c, *c.residual, "needs residual of sizes ");
  if (c.output) widen_output(entry, c, *c.output, "needs out of sizes ");
}

Conv2dProblem problem_from(const Query& q) {
  if (q.count != 11) throw std::runtime_error("ai3: a conv1d query needs 11 sizes");
  const int64_t* s = q.sizes;
  auto beside = [](int64_t size, int64_t value) { return size < 0 ? size : value; };  // unknown as far as the other is
  const int64_t sizes[] = {s[0],
                           s[1],
                           beside(s[2], 1),
                           s[2],
                           s[3],
                           beside(s[4], 1),
                           s[4],
                           beside(s[5], 1),
                           s[5],
                           beside(s[6], 0),
                           s[6],
                           beside(s[7], 1),
                           s[7],
                           s[8],
                           s[9],
                           0,
                           s[10]};
  return conv2d_from({q.dtype, sizes, static_cast<int>(std::size(sizes)), q.exclude});
}

struct Conv1dOperation {
  using Call = Conv1dCall;
  using Problem = Conv2dProblem;
  static constexpr size_t weight_rank = 3;

  static const Operation& operation();
  static const Operation& gradient_operation() { return Conv2dOperation::operation(); }
  static Problem problem(const Entry& entry, Call& c) {
    widen(entry, c);
    return Conv2dOperation::problem(entry, c);
  }
  static Problem problem_of_weight(const Entry& entry, Call& c) {
    widen_window(entry, c), widen_weight(entry, c);
    return Conv2dOperation::problem_of_weight(entry, c);
  }
  static auto description(const Problem& p) { return pack_description(p); }
  static Tensor run(const Entry& entry, Call& c) {
    c.is_sequence = true;  // so that the weight need not be copied, by whose memory kept packs know it
    widen(entry, c);
    return as_sequence(conv2d_run(entry, c));
  }
  static Gradients gradients(const Entry& asked, Call& c, const Tensor& grad, const std::vector<bool>& wanted,
                             GradientEntries by) {
    widen(asked, c);
    Tensor image = as_contiguous(grad);
    widen_output(asked, c, image, "needs grad_output of the output's sizes ");
    Gradients result = conv2d_backward(asked, c, image, wanted, by);
    for (size_t i : {0u, 1u})
      if (wanted[i]) result[i] = as_sequence(result[i]);
    return result;
  }
};

AI3_WEIGHTED_OPERATORS("conv1d", Conv1dOperation, ", int[1] stride=1, int[1] padding=0, int[1] dilation=1, int groups=1",
                       ", int[1] stride, int[1] padding, int[1] dilation, int groups", "")
AI3_OPERATION(conv1d,
              "batch in_channels in_length out_channels kernel_length stride padding dilation groups has_bias deterministic",
              kinds, std::size(kinds), shared, std::size(shared), AI3_QUERIES(Conv2dProblem, problem_from))
const Operation& Conv1dOperation::operation() { return conv1d_operation; }

}  // namespace
}  // namespace ai3::ops
