// ai3::conv2d_<algorithm>: schema, checks, and the way from tensors to kernels.
#include "conv2d.h"

#include "../algos/core/level.h"
#include "program/step.h"

namespace ai3::ops {
namespace {

void set_strides(Conv2dProblem& p, bool channels_last) {
  p.x_stride = dense_strides(p.in_channels, p.in_height, p.in_width, channels_last);
  p.y_stride = dense_strides(p.out_channels, p.out_height, p.out_width, channels_last);
}

// The one rule of sizes: what they must be, and the output's. Those of a query may be unknown (-1), and make the output's so.
void set_outputs(Conv2dProblem& p) {
  auto check_positive = [](const char* name, int64_t h, int64_t w) {
    if (h == 0 || w == 0)
      throw std::runtime_error(std::string("needs ") + name + " of at least 1, got (" + std::to_string(h) + ", " +
                               std::to_string(w) + ")");
  };
  check_positive("a kernel", p.kernel_height, p.kernel_width), check_positive("stride", p.stride_h, p.stride_w);
  check_positive("dilation", p.dilation_h, p.dilation_w);
  if (p.groups == 0) throw std::runtime_error("needs groups of at least 1, got 0");
  auto check_channels = [&](int64_t channels, const char* of) {
    if (channels == 0 || (channels > 0 && p.groups > 0 && channels % p.groups != 0))
      throw std::runtime_error(std::string("needs a number of ") + of + " channels that groups divides, got " +
                               std::to_string(channels) + " and groups " + std::to_string(p.groups));
  };
  check_channels(p.in_channels, "input"), check_channels(p.out_channels, "output");
  if (p.batch > 0 && (p.in_height == 0 || p.in_width == 0))
    throw std::runtime_error("needs input with no dimension of 0 but the batch, got images of " + std::to_string(p.in_height) +
                             "x" + std::to_string(p.in_width));
  check_numel({p.batch, p.in_channels, p.in_height, p.in_width});
  check_numel({p.out_channels, p.in_channels, p.kernel_height, p.kernel_width});
  check_each({p.kernel_height, p.kernel_width, p.stride_h, p.stride_w, p.pad_h, p.pad_w, p.dilation_h, p.dilation_w});
  auto out = [](int64_t in, int64_t kernel, int64_t stride, int64_t pad, int64_t dilation) {
    if (std::min({in, kernel, stride, pad, dilation}) < 0) return int64_t{-1};
    const int64_t padded = in + 2 * pad, extent = dilation * (kernel - 1) + 1;
    if (padded < extent)
      throw std::runtime_error("needs a padded input no smaller than the kernel's extent, got " + std::to_string(padded) +
                               " and " + std::to_string(extent));
    return (padded - extent) / stride + 1;
  };
  p.out_height = out(p.in_height, p.kernel_height, p.stride_h, p.pad_h, p.dilation_h);
  p.out_width = out(p.in_width, p.kernel_width, p.stride_w, p.pad_w, p.dilation_w);
  check_numel({p.batch, p.out_channels, p.out_height, p.out_width});
  p.threads = sizes_known(p) ? threads(checked_product({p.batch, p.out_channels, p.out_height, p.out_width,
                                                        p.in_channels / p.groups, p.kernel_height, p.kernel_width}))
                             : threads();
}

// The arguments that are no sizes of tensors.
void check_window(const Entry& entry, Conv2dCall& c, const Sizes& weight) {
  check(weight.size() == 4, entry, "needs a 4-D weight (out_channels, in_channels/groups, kernel_height, kernel_width), got ",
        weight);
  spread(entry, c.stride, 2, "stride"), spread(entry, c.padding, 2, "padding"), spread(entry, c.dilation, 2, "dilation");
  check_each(entry, c.stride, 1, "stride"), check_each(entry, c.padding, 0, "padding"),
      check_each(entry, c.dilation, 1, "dilation");
  check(c.groups > 0, entry, "needs groups of at least 1, got ", c.groups);
}

}  // namespace

Conv2dProblem conv2d_from(const Query& q) {
  if (q.count != 17) throw std::runtime_error("ai3: a conv2d query needs 17 sizes");
  int64_t s[17];  // any negative number says unknown
  for (int i = 0; i < 17; i++) s[i] = std::max<int64_t>(q.sizes[i], -1);
  Conv2dProblem p{};
  p.dtype = q.dtype, p.exclude = q.exclude;
  p.batch = s[0], p.in_channels = s[1], p.in_height = s[2], p.in_width = s[3];
  p.out_channels = s[4], p.kernel_height = s[5], p.kernel_width = s[6];
  p.stride_h = s[7], p.stride_w = s[8], p.pad_h = s[9], p.pad_w = s[10], p.dilation_h = s[11], p.dilation_w = s[12];
  p.groups = s[13], p.has_bias = s[14] != 0, p.deterministic = s[16] > 0;
  set_outputs(p), set_strides(p, s[15] != 0);
  return p;
}

// The problem of a weight whose input is not known yet.
Conv2dProblem Conv2dOperation::problem_of_weight(const Entry& entry, Conv2dCall& c) {
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
                           0,
                           0};
  return conv2d_from({dtype_of(entry, c.weight), sizes, std::size(sizes)});
}

Conv2dProblem conv2d_problem(const Entry& entry, Conv2dCall& c, const Sizes& weight) {
  check_window(entry, c, weight);
  const int64_t rank = c.input.dim();
  check(rank == 3 || rank == 4, entry, "needs input (N, C, H, W) or (C, H, W), got ", c.input);
  c.unbatched = rank == 3;
  if (c.unbatched) c.input = torch::stable::unsqueeze(c.input, 0);
  Conv2dProblem p{};
  p.dtype = dtype_of(entry, c.input);
  p.batch = c.input.size(0), p.in_channels = c.input.size(1), p.in_height = c.input.size(2), p.in_width = c.input.size(3);
  p.out_channels = weight[0], p.kernel_height = weight[2], p.kernel_width = weight[3];
  p.stride_h = c.stride[0], p.stride_w = c.stride[1], p.pad_h = c.padding[0], p.pad_w = c.padding[1];
  p.dilation_h = c.dilation[0], p.dilation_w = c.dilation[1], p.groups = c.groups;
  p.has_bias = c.bias.has_value(), p.allow_tf32 = c.allow_tf32, p.deterministic = c.deterministic, p.exclude = c.excluded();
  p.parameters = c.parameters.value_or(entry.defaults);
  check(p.in_channels == checked_mul(weight[1], p.groups), entry, "needs input of ", checked_mul(weight[1], p.groups),
        " channels for weight ", weight, " and groups ", p.groups, ", got ", c.input);
  set_outputs(p);
  if (c.bias) {
    check(c.bias->dim() == 1 && c.bias->size(0) == p.out_channels, entry, "needs a bias of ", p.out_channels, " elements, got ",
          *c.bias);
    check_same(entry, c.input, *c.bias, "bias");
  }
  return p;
}

namespace {

// The prologue's scale or shift as kernels read it: of the type that they accumulate in; `otherwise` everywhere where absent.
Tensor of_channels(const Entry& asked, const std::optional<Tensor>& given, const Tensor& input, double otherwise,
                   const char* name) {
  const ScalarType type = input.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  const int64_t channels = input.size(1);
  if (!given) return torch::stable::fill_(empty({channels}, type, input), otherwise);
  check(given->dim() == 1 && given->size(0) == channels && given->scalar_type() == type && given->device() == input.device(),
        asked, "needs ", name, " of ", channels, type == ScalarType::Double ? " float64" : " float32",
        " elements on the input's device, got ", *given);
  return as_contiguous(*given);
}

}  // namespace

Tensor conv2d_run(const Entry& asked, Conv2dCall& c) {
  check_weight(asked, c);
  const bool packed = !c.weight_size.empty();
  Conv2dProblem p = conv2d_problem(asked, c, packed ? c.weight_size : sizes_of(c.weight));
  bool channels_last = suggests_channels_last(c.input) || (!packed && !c.is_sequence && suggests_channels_last(c.weight));
  const Sizes sizes = {p.batch, p.out_channels, p.out_height, p.out_width};
  if (c.unbatched && c.output) c.output = torch::stable::unsqueeze(*c.output, 0);
  if (c.unbatched && c.residual && c.residual->dim() == 3) c.residual = torch::stable::unsqueeze(*c.residual, 0);
  check_places(asked, c, sizes);
  if (c.output) channels_last = takes_channels_last(*c.output);
  p.activation = c.activation, p.has_residual = c.residual.has_value();
  p.has_prologue = c.has_prologue(), p.input_relu = c.input_relu;
  set_strides(p, channels_last);
  const Prepared<Conv2dProblem> call = prepare(asked, where_of(asked, c.input), p, p.batch > 0);
  const Traits<Conv2dProblem>& traits = call.algorithm->traits;
  if (packed) check_pack(asked, c.weight, call.pack_tensor, pack_tag(asked, pack_description(p)));
  const std::optional<Tensor> slope = slope_for(asked, c, p.out_channels);
  Tensor scale, shift;
  if (p.has_prologue) {
    scale = of_channels(asked, c.input_scale, c.input, 1, "input_scale");
    shift = of_channels(asked, c.input_shift, c.input, 0, "input_shift");
    if (c.output) check_apart(asked, *c.output, scale, "input_scale"), check_apart(asked, *c.output, shift, "input_shift");
    check_workspace(asked, c.workspace, {{&scale, "input_scale"}, {&shift, "input_shift"}});
  }

  if (traits.tensors && p.batch > 0) {
    c.channels_last = channels_last, c.algorithm = &call.algorithm->info;
    convert_weight(call, c, pack_description(p));
    traits.tensors(p, &c);
    const Tensor output = with_dense_strides(*c.result, channels_last);
    if (c.output) torch::stable::copy_(*c.output, output);
    return c.unbatched ? torch::stable::squeeze(output, 0) : output;
  }
  Destination output(c.output, traits.sliced, sizes, c.input, channels_last);
  if (p.batch > 0) {
    const ReadyWeight weight = packed ? ReadyWeight{c.weight, call.packs_alone} : ready_weight(call, c, pack_description(p));
    const Tensor w = aligned(weight.tensor), b = c.bias ? aligned(as_contiguous(*c.bias)) : w;
    run_dense(call, p, set_strides, aligned(c.input), output.tensor, channels_last, [&](const Tensor& x, Tensor& y) {
      output.set_strides(y, p.y_stride);
      auto dense_residual = [&](const Tensor& r) { return dense(r, p.y_stride.c == 1); };
      const Tensor r = c.residual ? residual_for(*c.residual, y, !is_dense(y, p.y_stride.c == 1), dense_residual) : x;
      run_kernel(call, p,
                 {.input = x.const_data_ptr(),
                  .weight = w.const_data_ptr(),
                  .bias = c.bias ? b.const_data_ptr() : nullptr,
                  .residual = c.residual ? r.const_data_ptr() : nullptr,
                  .output = y.mutable_data_ptr(),
                  .scale = p.has_prologue ? scale.const_data_ptr() : nullptr,
                  .shift = p.has_prologue ? shift.const_data_ptr() : nullptr,
                  .slope = slope ? slope->const_data_ptr() : nullptr},
                 x, weight.packed, c.workspace);
    });
  }
  output.copy_to(c.output);
  return c.unbatched ? torch::stable::squeeze(output.tensor, 0) : output.tensor;
}

namespace {

// A line of a program: conv2d_<algorithm> %x weight=$0:64,64,3,3 stride=1,1 padding=1,1 dilation=1,1 groups=1.
struct Conv2dStep final : program::Step {
  Conv2dProblem p;
  const Entry& entry;
  bool reads_slices, reads_planes;

  explicit Conv2dStep(program::Reader& r) : entry(*r.entry) {
    const program::Line& line = r.line;
    const Traits<Conv2dProblem>& traits = r.traits<Conv2dProblem>();
    const program::Value x = r.image();
    const Sizes w = line.constant_sizes("weight", 4), stride = line.numbers("stride", 2), padding = line.numbers("padding", 2),
                dilation = line.numbers("dilation", 2);
    const int64_t groups = line.number_of("groups"), channels = x.sizes[1];
    auto each = [&](const Sizes& list, int64_t least, const char* name) {
      for (int64_t v : list)
        line.check(v >= least && v <= INT32_MAX, std::string("needs ") + name + " of at least " + std::to_string(least));
    };
    each(w, 1, "sizes of weight"), each(stride, 1, "stride"), each(padding, 0, "padding"), each(dilation, 1, "dilation");
    line.check(groups > 0 && w[0] % groups == 0 && channels == checked_mul(w[1], groups),
               "needs input of " + std::to_string(checked_mul(w[1], groups)) + " channels and groups that divide " +
                   std::to_string(w[0]) + ", got " + to_string(x.sizes));
    p = Conv2dProblem{};
    p.dtype = x.dtype, p.batch = x.sizes[0], p.in_channels = channels, p.in_height = x.sizes[2], p.in_width = x.sizes[3];
    p.out_channels = w[0], p.kernel_height = w[2], p.kernel_width = w[3], p.stride_h = stride[0], p.stride_w = stride[1];
    p.pad_h = padding[0], p.pad_w = padding[1], p.dilation_h = dilation[0], p.dilation_w = dilation[1], p.groups = groups;
    p.has_bias = line.has("bias"), p.parameters = r.parameters();
    set_outputs(p);
    r.epilogue(p, w[0]);
    p.input_relu = line.word("input_relu", "0") == "1", p.has_prologue = line.has("scale");
    line.check(p.has_prologue == line.has("shift") && (p.has_prologue || !p.input_relu), "needs scale with shift and input_relu");
    r.weight(p);
    r.elements("bias", p.dtype, w[0]);
    r.elements("scale", program::accumulator(p.dtype), channels), r.elements("shift", program::accumulator(p.dtype), channels);
    // Of the built-in algorithms the one that reads an NCHW image into NHWC output (docs/decisions/program.md).
    constexpr int64_t kFewChannels = 16;
    reads_planes = entry.name == "direct" && level() == entry.on(Device::cpu)->level && channels < kFewChannels;
    reads_slices = traits.sliced, writes_slices = traits.sliced && !p.has_residual;
    r.image_output({p.batch, p.out_channels, p.out_height, p.out_width}, p.dtype);
  }
  void emit(program::Emitter& e) override {
    const int given = e.operand(0);
    const bool planes = reads_planes && e.values().is_dense(given, program::natural_order(4));
    const int x = planes ? given : e.rows(given, program::image_order(), reads_slices);
    const int residual = p.has_residual ? e.rows(e.line().value("residual"), program::image_order(), false) : -1;
    p.x_stride = planes ? e.plane_strides(x) : e.image_strides(x), p.y_stride = e.image_strides(e.value);
    e.step(entry, p,
           {.input = e.at(x),
            .weight = e.constant("weight"),
            .bias = e.constant("bias"),
            .residual = e.at(residual),
            .output = e.output(),
            .scale = e.constant("scale"),
            .shift = e.constant("shift"),
            .slope = e.constant("slope")});
  }
};
AI3_STEPS(conv2d, Conv2dStep)

AI3_WEIGHTED_OPERATORS("conv2d", Conv2dOperation, ", int[2] stride=1, int[2] padding=0, int[2] dilation=1, int groups=1",
                       ", int[2] stride, int[2] padding, int[2] dilation, int groups",
                       ", Tensor? input_scale=None, Tensor? input_shift=None, bool input_relu=False")
AI3_OPERATION(
    conv2d,
    "batch in_channels in_height in_width out_channels kernel_height kernel_width stride_h stride_w pad_h pad_w dilation_h "
    "dilation_w groups has_bias channels_last deterministic",
    kinds, std::size(kinds), shared, std::size(shared), AI3_QUERIES(Conv2dProblem, conv2d_from))

}  // namespace

const Operation& Conv2dOperation::operation() { return conv2d_operation; }
Conv2dProblem Conv2dOperation::problem(const Entry& entry, Call& c) {
  Problem p = conv2d_problem(entry, c, sizes_of(c.weight));
  set_strides(p, suggests_channels_last(c.input) || suggests_channels_last(c.weight));
  return p;
}
}  // namespace ai3::ops
