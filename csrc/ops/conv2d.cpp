// ai3::conv2d_<algorithm>: schema, checks, and the way from tensors to kernels.
#include "conv2d.h"

namespace ai3::ops {
namespace {

void set_strides(Conv2dProblem& p, bool channels_last) {
  p.x_stride = dense_strides(p.in_channels, p.in_height, p.in_width, channels_last);
  p.y_stride = dense_strides(p.out_channels, p.out_height, p.out_width, channels_last);
}

Conv2dProblem problem_from(const Query& q) {
  if (q.count != 16) throw std::runtime_error("ai3: a conv2d query needs 16 sizes");
  const int64_t* s = q.sizes;
  Conv2dProblem p{};
  p.dtype = q.dtype, p.threads = threads();
  p.batch = s[0], p.in_channels = s[1], p.in_height = s[2], p.in_width = s[3];
  p.out_channels = s[4], p.kernel_height = s[5], p.kernel_width = s[6];
  p.stride_h = s[7], p.stride_w = s[8], p.pad_h = s[9], p.pad_w = s[10], p.dilation_h = s[11], p.dilation_w = s[12];
  p.groups = s[13], p.has_bias = s[14] != 0;
  const bool channels_last = s[15] != 0;
  auto out = [](int64_t in, int64_t kernel, int64_t stride, int64_t pad, int64_t dilation) {
    return in < 0 ? -1 : (in + 2 * pad - dilation * (kernel - 1) - 1) / stride + 1;
  };
  p.out_height = out(p.in_height, p.kernel_height, p.stride_h, p.pad_h, p.dilation_h);
  p.out_width = out(p.in_width, p.kernel_width, p.stride_w, p.pad_w, p.dilation_w);
  set_strides(p, channels_last);
  return p;
}

}  // namespace

// Checks the arguments as torch.nn.functional.conv2d does and fills the problem, strides excepted.
Conv2dProblem conv2d_problem(const Entry& entry, Conv2dCall& c, const Sizes& weight) {
  check(weight.size() == 4, entry, "needs a 4-D weight (out_channels, in_channels/groups, kernel_height, kernel_width), got ",
        to_string(weight));
  const int64_t rank = c.input.dim();
  check(rank == 3 || rank == 4, entry, "needs input (N, C, H, W) or (C, H, W), got ", to_string(sizes_of(c.input)));
  c.unbatched = rank == 3;
  if (c.unbatched) c.input = torch::stable::unsqueeze(c.input, 0);
  spread(entry, c.stride, 2, "stride"), spread(entry, c.padding, 2, "padding"), spread(entry, c.dilation, 2, "dilation");
  check_each(entry, c.stride, 1, "stride"), check_each(entry, c.padding, 0, "padding"),
      check_each(entry, c.dilation, 1, "dilation");
  Conv2dProblem p{};
  p.dtype = dtype_of(entry, c.input);
  p.threads = threads();
  p.batch = c.input.size(0), p.in_channels = c.input.size(1), p.in_height = c.input.size(2), p.in_width = c.input.size(3);
  p.out_channels = weight[0], p.kernel_height = weight[2], p.kernel_width = weight[3];
  p.stride_h = c.stride[0], p.stride_w = c.stride[1], p.pad_h = c.padding[0], p.pad_w = c.padding[1];
  p.dilation_h = c.dilation[0], p.dilation_w = c.dilation[1], p.groups = c.groups;
  p.has_bias = c.bias.has_value(), p.allow_tf32 = c.allow_tf32, p.deterministic = c.deterministic;
  check(p.groups > 0, entry, "needs groups of at least 1, got ", p.groups);
  check(p.out_channels > 0 && p.out_channels % p.groups == 0, entry,
        "needs a number of output channels that groups divides, got ", p.out_channels, " and groups ", p.groups);
  check(p.in_channels > 0 && p.in_channels == checked_mul(weight[1], p.groups), entry, "needs input of ",
        checked_mul(weight[1], p.groups), " channels for weight ", to_string(weight), " and groups ", p.groups, ", got ",
        to_string(sizes_of(c.input)));
  check(p.in_height > 0 && p.in_width > 0, entry, "needs input with a height and width of at least 1, got ",
        to_string(sizes_of(c.input)));
  check(p.kernel_height > 0 && p.kernel_width > 0, entry, "needs a kernel of at least 1x1, got ", to_string(weight));
  auto out = [&](int64_t in, int64_t kernel, int64_t stride, int64_t pad, int64_t dilation) {
    const int64_t padded = checked_add(in, 2 * pad), extent = checked_add(checked_mul(dilation, kernel - 1), 1);
    check(padded >= extent && padded != kOverflow, entry, "needs a padded input no smaller than the kernel's extent, got ",
          padded, " and ", extent);
    return (padded - extent) / stride + 1;
  };
  p.out_height = out(p.in_height, p.kernel_height, p.stride_h, p.pad_h, p.dilation_h);
  p.out_width = out(p.in_width, p.kernel_width, p.stride_w, p.pad_w, p.dilation_w);
  if (c.bias) {
    check(c.bias->dim() == 1 && c.bias->size(0) == p.out_channels, entry, "needs a bias of ", p.out_channels, " elements, got ",
          to_string(sizes_of(*c.bias)));
    check_same(entry, c.input, *c.bias, "bias");
  }
  checked_numel(entry, {p.batch, p.out_channels, p.out_height, p.out_width}, 8);
  return p;
}

Tensor conv2d_run(const Entry& asked, Conv2dCall& c) {
  check_same(asked, c.input, c.weight, "weight");
  Conv2dProblem p = conv2d_problem(asked, c, sizes_of(c.weight));
  const Device device = device_of(asked, c.input);
  const bool channels_last = suggests_channels_last(c.input) || suggests_channels_last(c.weight);
  set_strides(p, channels_last);
  const Chosen<Conv2dProblem> chosen(asked, device, p);
  Tensor output = c.input;
  if (chosen.algorithm->traits.tensors && p.batch > 0) {
    c.channels_last = channels_last;
    chosen.algorithm->traits.tensors(p, &c);
    output = c.output.value();
  } else {
    output = empty({p.batch, p.out_channels, p.out_height, p.out_width}, c.input.scalar_type(), c.input, channels_last);
    if (p.batch > 0) {
      const Tensor w = as_contiguous(c.weight), b = c.bias ? as_contiguous(*c.bias) : w;
      run_dense(chosen, p, set_strides, c.input, output, channels_last, [&](const Tensor& x, Tensor& y) {
        run_kernel(chosen, p,
                   {x.const_data_ptr(), w.const_data_ptr(), c.bias ? b.const_data_ptr() : nullptr, nullptr, y.mutable_data_ptr()},
                   x);
      });
    }
  }
  return c.unbatched ? torch::stable::squeeze(output, 0) : output;
}

namespace {

void forward(const Entry& entry, StableIValue* stack) {
  Arguments in(stack);
  Conv2dCall c(in);
  give(stack, 0, conv2d_run(entry, c));
}

#define CONV2D_ARGUMENTS \
  "Tensor input, Tensor weight, Tensor? bias=None, int[2] stride=1, int[2] padding=0, int[2] dilation=1, int groups=1"
constexpr OperatorKind kinds[] = {
    {"conv2d_", "", "(" CONV2D_ARGUMENTS ", *, bool allow_tf32=False, bool deterministic=False) -> Tensor", forward, nullptr},
};
AI3_OPERATION(
    conv2d,
    "batch in_channels in_height in_width out_channels kernel_height kernel_width stride_h stride_w pad_h pad_w dilation_h "
    "dilation_w groups has_bias channels_last",
    kinds, std::size(kinds), nullptr, 0, AI3_QUERIES(Conv2dProblem, problem_from))

}  // namespace
}  // namespace ai3::ops
