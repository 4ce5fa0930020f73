// ai3::conv2d_<algorithm>: schema, checks, and the way from tensors to kernels.
#include "conv2d.h"

namespace ai3::ops {
namespace {

void set_strides(Conv2dProblem& p, bool channels_last) {
  p.x_stride = dense_strides(p.in_channels, p.in_height, p.in_width, channels_last);
  p.y_stride = dense_strides(p.out_channels, p.out_height, p.out_width, channels_last);
}

// What does not depend on the input.
void check_window(const Entry& entry, Conv2dCall& c, const Sizes& weight) {
  check(weight.size() == 4, entry, "needs a 4-D weight (out_channels, in_channels/groups, kernel_height, kernel_width), got ",
        to_string(weight));
  spread(entry, c.stride, 2, "stride"), spread(entry, c.padding, 2, "padding"), spread(entry, c.dilation, 2, "dilation");
  check_each(entry, c.stride, 1, "stride"), check_each(entry, c.padding, 0, "padding"),
      check_each(entry, c.dilation, 1, "dilation");
  check(c.groups > 0, entry, "needs groups of at least 1, got ", c.groups);
  check(weight[0] > 0 && weight[0] % c.groups == 0, entry, "needs a number of output channels that groups divides, got ",
        weight[0], " and groups ", c.groups);
  check(weight[1] > 0 && weight[2] > 0 && weight[3] > 0, entry, "needs a kernel of at least 1x1 and one channel, got ",
        to_string(weight));
}

Conv2dProblem problem_from(const Query& q) {
  if (q.count != 16) throw std::runtime_error("ai3: a conv2d query needs 16 sizes");
  const int64_t* s = q.sizes;
  if (s[7] == 0 || s[8] == 0 || s[13] == 0) throw std::runtime_error("needs stride and groups of at least 1, got 0");
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

// What a pack may depend on.
Sizes pack_description(const Conv2dProblem& p) {
  return {static_cast<int64_t>(p.dtype),
          p.in_channels,
          p.out_channels,
          p.kernel_height,
          p.kernel_width,
          p.stride_h,
          p.stride_w,
          p.dilation_h,
          p.dilation_w,
          p.groups};
}

// The problem of a weight whose input is not known yet.
Conv2dProblem problem_of_weight(const Entry& entry, Conv2dCall& c) {
  const Sizes weight = sizes_of(c.weight);
  check_window(entry, c, weight);
  const int64_t sizes[] = {-1,
                           checked_mul(weight[1], c.groups),
                           -1,
                           -1,
                           weight[0],
                           weight[2],
                           weight[3],
                           c.stride[0],
                           c.stride[1],
                           c.padding[0],
                           c.padding[1],
                           c.dilation[0],
                           c.dilation[1],
                           c.groups,
                           0,
                           0};
  return problem_from({dtype_of(entry, c.weight), sizes, std::size(sizes)});
}
const Operation& operation();

}  // namespace

Conv2dProblem conv2d_problem(const Entry& entry, Conv2dCall& c, const Sizes& weight) {
  check_window(entry, c, weight);
  const int64_t rank = c.input.dim();
  check(rank == 3 || rank == 4, entry, "needs input (N, C, H, W) or (C, H, W), got ", to_string(sizes_of(c.input)));
  c.unbatched = rank == 3;
  if (c.unbatched) c.input = torch::stable::unsqueeze(c.input, 0);
  Conv2dProblem p{};
  p.dtype = dtype_of(entry, c.input);
  p.threads = threads();
  p.batch = c.input.size(0), p.in_channels = c.input.size(1), p.in_height = c.input.size(2), p.in_width = c.input.size(3);
  p.out_channels = weight[0], p.kernel_height = weight[2], p.kernel_width = weight[3];
  p.stride_h = c.stride[0], p.stride_w = c.stride[1], p.pad_h = c.padding[0], p.pad_w = c.padding[1];
  p.dilation_h = c.dilation[0], p.dilation_w = c.dilation[1], p.groups = c.groups;
  p.has_bias = c.bias.has_value(), p.allow_tf32 = c.allow_tf32, p.deterministic = c.deterministic;
  check(p.in_channels == checked_mul(weight[1], p.groups), entry, "needs input of ", checked_mul(weight[1], p.groups),
        " channels for weight ", to_string(weight), " and groups ", p.groups, ", got ", to_string(sizes_of(c.input)));
  check(p.in_height > 0 && p.in_width > 0, entry, "needs input with a height and width of at least 1, got ",
        to_string(sizes_of(c.input)));
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

namespace {

// y's strides where it is a slice of the channels of a larger dense tensor.
bool slice_strides(const Tensor& y, bool channels_last, Strides4& strides) {
  const int64_t hw = y.size(2) * y.size(3);
  strides = {y.stride(0), y.stride(1), y.stride(2), y.stride(3)};
  const int64_t pixel = channels_last ? y.stride(3) : 1;
  return channels_last ? strides.c == 1 && pixel >= y.size(1) && strides.h == y.size(3) * pixel && strides.n == hw * pixel
                       : strides.w == 1 && strides.h == y.size(3) && strides.c == hw && strides.n >= y.size(1) * hw;
}

}  // namespace

Tensor conv2d_run(const Entry& asked, Conv2dCall& c) {
  check_same(asked, c.input, c.weight, "weight");
  const bool packed = !c.weight_size.empty();
  Conv2dProblem p = conv2d_problem(asked, c, packed ? c.weight_size : sizes_of(c.weight));
  const Device device = device_of(asked, c.input);
  bool channels_last = suggests_channels_last(c.input) || (!packed && suggests_channels_last(c.weight));
  const Sizes sizes = {p.batch, p.out_channels, p.out_height, p.out_width};
  Tensor given;
  if (c.output) {
    given = c.unbatched ? torch::stable::unsqueeze(*c.output, 0) : *c.output;
    check_same(asked, c.input, given, "out");
    check(sizes_of(given) == sizes, asked, "needs an out of sizes ", to_string(sizes), ", got ", to_string(sizes_of(given)));
    Strides4 ignored;
    channels_last = slice_strides(given, true, ignored) && !slice_strides(given, false, ignored);
  }
  p.activation = c.activation, p.has_residual = c.residual.has_value();
  set_strides(p, channels_last);
  const Chosen<Conv2dProblem> chosen(asked, device, p);
  const Traits<Conv2dProblem>& traits = chosen.algorithm->traits;
  check(traits.epilogue || (!p.has_residual && p.activation == Activation::none), asked, "fuses no residual and no activation");
  if (p.has_residual) {
    if (c.unbatched && c.residual->dim() == 3) c.residual = torch::stable::unsqueeze(*c.residual, 0);
    check_same(asked, c.input, *c.residual, "residual");
    check(sizes_of(*c.residual) == sizes, asked, "needs a residual of sizes ", to_string(sizes), ", got ",
          to_string(sizes_of(*c.residual)));
  }
  if (c.output) {
    check_apart(asked, given, c.input, "input"), check_apart(asked, given, c.weight, "the packed weight");
    if (c.bias) check_apart(asked, given, *c.bias, "bias");
    if (c.residual) check_apart(asked, given, *c.residual, "residual");
  }
  if (packed) check_pack(asked, c.weight, packed_tensor_bytes(traits, p), pack_tag(asked, pack_description(p)));

  Tensor output;
  if (traits.tensors && p.batch > 0) {
    c.channels_last = channels_last;
    const DeviceGuard guard = on_device_of(c.input);
    traits.tensors(p, &c);
    output = with_dense_strides(*c.output, channels_last);
  } else {
    Strides4 slice{};
    const bool direct =
        c.output && (is_dense(given, channels_last) || (traits.sliced && slice_strides(given, channels_last, slice)));
    output = direct ? given : empty(sizes, c.input.scalar_type(), c.input, channels_last);
    if (p.batch > 0) {
      const Tensor w = packed ? c.weight : as_contiguous(c.weight), b = c.bias ? as_contiguous(*c.bias) : w;
      run_dense(chosen, p, set_strides, c.input, output, channels_last, [&](const Tensor& x, Tensor& y) {
        if (direct && slice.n && y.const_data_ptr() == output.const_data_ptr()) p.y_stride = slice;
        const Tensor r = c.residual ? dense(*c.residual, p.y_stride.c == 1) : x;
        run_kernel(chosen, p,
                   {x.const_data_ptr(), w.const_data_ptr(), c.bias ? b.const_data_ptr() : nullptr,
                    c.residual ? r.const_data_ptr() : nullptr, y.mutable_data_ptr()},
                   x, packed && traits.packed_bytes);
      });
    }
    if (c.output && !direct) torch::stable::copy_(given, output);
  }
  return c.unbatched ? torch::stable::squeeze(output, 0) : output;
}

namespace {

void forward(const Entry& entry, StableIValue* stack) {
  Arguments in(stack);
  Conv2dCall c;
  c.input = in.take<Tensor>(), c.weight = in.take<Tensor>(), c.bias = in.take<std::optional<Tensor>>();
  c.take_window(in), c.take_options(in);
  give(stack, 0, conv2d_run(entry, c));
}

// The algorithm of the gradients that `asked` computes itself, or null where PyTorch does.
const Entry* own_backward(const Entry& asked, Conv2dCall c) {
  Conv2dProblem p = conv2d_problem(asked, c, sizes_of(c.weight));
  p.deterministic = false;  // what runs is asked again, and PyTorch's gradients are none of the algorithm's affair
  set_strides(p, suggests_channels_last(c.input) || suggests_channels_last(c.weight));
  const Chosen<Conv2dProblem> chosen(asked, device_of(asked, c.input), p);
  return chosen.algorithm->traits.backward == Backward::own ? chosen.entry : nullptr;
}
struct BackwardArguments {
  explicit BackwardArguments(Arguments& in) : grad(in.take<Tensor>()) {
    call.input = in.take<Tensor>(), call.weight = in.take<Tensor>();
    call.take_window(in);
    wanted = in.take<std::vector<bool>>();
  }
  Tensor grad;
  Conv2dCall call;
  std::vector<bool> wanted;
};
void backward(const Entry& entry, StableIValue* stack) {
  Arguments in(stack);
  BackwardArguments a(in);
  a.call.take_options(in);
  const Entry* own = own_backward(entry, a.call);
  give_gradients(stack, conv2d_backward(entry, a.call, a.grad, a.wanted, own, own));
}

void mixed(StableIValue* stack) {
  Arguments in(stack);
  Conv2dCall c;
  c.input = in.take<Tensor>(), c.weight = in.take<Tensor>(), c.bias = in.take<std::optional<Tensor>>();
  c.take_window(in);
  const std::string name = in.take<std::string>();
  for (int i : {0, 1}) (void)i, in.take<std::string>();
  c.take_options(in);
  give(stack, 0, conv2d_run(entry_named(operation(), name), c));
}
void mixed_backward(StableIValue* stack) {
  Arguments in(stack);
  BackwardArguments a(in);
  const std::string names[] = {in.take<std::string>(), in.take<std::string>(), in.take<std::string>()};
  a.call.take_options(in);
  const Entry& asked = entry_named(operation(), names[0]);
  const Entry* own = names[1].empty() || names[2].empty() ? own_backward(asked, a.call) : nullptr;
  const Entry* by[2];
  for (int i : {0, 1}) by[i] = names[i + 1].empty() ? own : &entry_named(operation(), names[i + 1]);
  give_gradients(stack, conv2d_backward(asked, a.call, a.grad, a.wanted, by[0], by[1]));
}

void pack(const Entry& entry, StableIValue* stack) {
  Arguments in(stack);
  Conv2dCall c;
  c.weight = in.take<Tensor>();
  c.take_window(in);
  const Conv2dProblem p = problem_of_weight(entry, c);
  const Chosen<Conv2dProblem> chosen(entry, device_of(entry, c.weight), p);
  give(stack, 0, pack_weight(chosen, p, c.weight, pack_description(p)));
}
Conv2dCall packed_call(const Entry& entry, Arguments& in) {
  Conv2dCall c;
  c.input = in.take<Tensor>(), c.weight = in.take<Tensor>(), c.weight_size = in.take<Sizes>();
  c.bias = in.take<std::optional<Tensor>>();
  c.take_window(in);
  c.residual = in.take<std::optional<Tensor>>();
  const std::string activation = in.take<std::string>();
  c.take_options(in);
  check(c.weight_size.size() == 4, entry, "needs the 4 sizes of the weight, got ", to_string(c.weight_size));
  c.activation = activation_named(entry, activation);
  return c;
}
void packed(const Entry& entry, StableIValue* stack) {
  Arguments in(stack);
  Conv2dCall c = packed_call(entry, in);
  give(stack, 0, conv2d_run(entry, c));
}
void packed_out(const Entry& entry, StableIValue* stack) {
  Arguments in(stack);
  Conv2dCall c = packed_call(entry, in);
  c.output = in.take<Tensor>();
  conv2d_run(entry, c);
}

#define WINDOW "int[2] stride=1, int[2] padding=0, int[2] dilation=1, int groups=1"
#define OPTIONS "bool allow_tf32=False, bool deterministic=False"
#define PACKED                                                                  \
  "(Tensor input, Tensor packed, int[] weight_size, Tensor? bias=None, " WINDOW \
  ", Tensor? residual=None, str activation=\"none\", *, " OPTIONS
#define GRADIENTS                                                                                                         \
  "Tensor grad_output, Tensor input, Tensor weight, int[2] stride, int[2] padding, int[2] dilation, int groups, bool[3] " \
  "output_mask, *, "
constexpr OperatorKind kinds[] = {
    {"conv2d_", "", "(Tensor input, Tensor weight, Tensor? bias=None, " WINDOW ", *, " OPTIONS ") -> Tensor", forward, nullptr},
    {"_conv2d_", "_backward", "(" GRADIENTS OPTIONS ") -> (Tensor, Tensor, Tensor)", backward, nullptr},
    {"_conv2d_", "_pack", "(Tensor weight, " WINDOW ") -> Tensor", pack, has_packs<Conv2dProblem>},
    {"_conv2d_", "_packed", PACKED ") -> Tensor", packed, has_packs<Conv2dProblem>},
    {"_conv2d_", "_packed_out", PACKED ", Tensor(a!) out) -> ()", packed_out, has_packs<Conv2dProblem>},
};
// The algorithms of output and gradients by name; "" for a gradient: as ai3::_conv2d_<forward>_backward computes it.
#define NAMES "str forward, str backward_input=\"\", str backward_weight=\"\", "
constexpr SharedOperator shared[] = {
    {"_conv2d_mixed(Tensor input, Tensor weight, Tensor? bias=None, " WINDOW ", *, " NAMES OPTIONS ") -> Tensor", mixed},
    {"_conv2d_mixed_backward(" GRADIENTS NAMES OPTIONS ") -> (Tensor, Tensor, Tensor)", mixed_backward},
};
AI3_OPERATION(
    conv2d,
    "batch in_channels in_height in_width out_channels kernel_height kernel_width stride_h stride_w pad_h pad_w dilation_h "
    "dilation_w groups has_bias channels_last",
    kinds, std::size(kinds), shared, std::size(shared), AI3_QUERIES(Conv2dProblem, problem_from))
const Operation& operation() { return conv2d_operation; }

}  // namespace
}  // namespace ai3::ops
