#include "pool2d.h"

namespace ai3::ops {
namespace {

// A window may start in the input or its left padding, never in what ceil_mode adds on the right.
int64_t pooled(int64_t in, int64_t kernel, int64_t stride, int64_t pad, int64_t dilation, bool ceil_mode) {
  if (in < 0 || kernel < 0 || stride < 0 || pad < 0 || dilation < 0) return -1;
  const int64_t room = in + 2 * pad - dilation * (kernel - 1) - 1;
  if (room < 0 && !(ceil_mode && room + stride > 0)) return 0;
  const int64_t out = (room + (ceil_mode ? stride - 1 : 0)) / stride + 1;
  return ceil_mode && (out - 1) * stride >= in + pad ? out - 1 : out;
}
void set_outputs(Pool2dProblem& p) {
  p.out_height = pooled(p.in_height, p.kernel_height, p.stride_h, p.pad_h, p.dilation_h, p.ceil_mode);
  p.out_width = pooled(p.in_width, p.kernel_width, p.stride_w, p.pad_w, p.dilation_w, p.ceil_mode);
}
void set_strides(Pool2dProblem& p, bool channels_last) {
  p.x_stride = dense_strides(p.channels, p.in_height, p.in_width, channels_last);
  p.y_stride = dense_strides(p.channels, p.out_height, p.out_width, channels_last);
}

Pool2dProblem problem_of_input(const Entry& entry, const Tensor& input) {
  const int64_t rank = input.dim();
  check(rank == 3 || rank == 4, entry, "needs input (N, C, H, W) or (C, H, W), got ", input);
  Pool2dProblem p{};
  p.dtype = dtype_of(entry, input), p.threads = threads();
  p.batch = rank == 4 ? input.size(0) : 1;
  p.channels = input.size(rank - 3), p.in_height = input.size(rank - 2), p.in_width = input.size(rank - 1);
  return p;
}

// Runs p, whose output sizes are known.
Tensor run(const Entry& asked, Tensor input, Pool2dProblem& p, const Given& given) {
  p.parameters = given.parameters;
  std::optional<Tensor> out = given.out;
  const bool unbatched = input.dim() == 3;
  Sizes sizes = {p.batch, p.channels, p.out_height, p.out_width};
  if (out) {
    check_place(asked, input, *out, unbatched ? Sizes(sizes.begin() + 1, sizes.end()) : sizes, "out");
    check_apart(asked, *out, input, "input");
    check_workspace(asked, given.workspace, {{&input, "input"}, {&*out, "out"}});
    if (unbatched) out = torch::stable::unsqueeze(*out, 0);
  }
  const bool channels_last = out ? takes_channels_last(*out) : suggests_channels_last(input);
  checked_numel(asked, sizes, 8);
  set_strides(p, channels_last);
  const bool some = p.batch > 0 && p.channels > 0 && p.out_height > 0 && p.out_width > 0;
  const Prepared<Pool2dProblem> call = prepare(asked, where_of(asked, input), p, some);
  if (unbatched) input = torch::stable::unsqueeze(input, 0);
  Destination output(out, call.algorithm->traits.sliced, sizes, input, channels_last);
  if (some)
    run_dense(call, p, set_strides, input, output.tensor, channels_last, [&](const Tensor& x, Tensor& y) {
      output.set_strides(y, p.y_stride);
      run_kernel(call, p, {x.const_data_ptr(), y.mutable_data_ptr()}, x, false, given.workspace);
    });
  output.copy_to(out);
  return unbatched ? torch::stable::squeeze(output.tensor, 0) : output.tensor;
}

}  // namespace

Tensor pool2d_run(const Entry& asked, Pool2dCall& c, const Given& given) {
  spread(asked, c.kernel, 2, "kernel_size");
  if (c.stride.empty()) c.stride = c.kernel;
  spread(asked, c.stride, 2, "stride"), spread(asked, c.padding, 2, "padding"), spread(asked, c.dilation, 2, "dilation");
  check_each(asked, c.kernel, 1, "kernel_size"), check_each(asked, c.stride, 1, "stride");
  check_each(asked, c.padding, 0, "padding"), check_each(asked, c.dilation, 1, "dilation");
  for (int i : {0, 1})
    check(c.padding[i] <= c.kernel[i] / 2, asked, "needs padding of at most half the kernel size, got padding ", c.padding,
          " and kernel_size ", c.kernel);
  check(!c.divisor || *c.divisor != 0, asked, "needs a divisor_override other than 0, got 0");
  Pool2dProblem p = problem_of_input(asked, c.input);
  check(p.channels > 0 && p.in_height > 0 && p.in_width > 0, asked, "needs input with no dimension of 0 but the batch, got ",
        c.input);
  p.kernel_height = c.kernel[0], p.kernel_width = c.kernel[1], p.stride_h = c.stride[0], p.stride_w = c.stride[1];
  p.pad_h = c.padding[0], p.pad_w = c.padding[1], p.dilation_h = c.dilation[0], p.dilation_w = c.dilation[1];
  p.ceil_mode = c.ceil_mode, p.count_include_pad = c.count_include_pad, p.divisor = c.divisor.value_or(0);
  set_outputs(p);
  check(p.out_height > 0 && p.out_width > 0, asked, "the input of ", p.in_height, "x", p.in_width,
        " is too small: no window of kernel_size ", c.kernel, " and dilation ", c.dilation, " fits");
  return run(asked, c.input, p, given);
}

Tensor adaptive_pool2d_run(const Entry& asked, const Tensor& input, Sizes output_size, const Given& given) {
  spread(asked, output_size, 2, "output_size"), check_each(asked, output_size, 0, "output_size");
  Pool2dProblem p = problem_of_input(asked, input);
  check(p.in_height > 0 && p.in_width > 0, asked, "needs input with a height and width of at least 1, got ", input);
  p.out_height = output_size[0], p.out_width = output_size[1];
  return run(asked, input, p, given);
}

PoolStep::PoolStep(program::Reader& r, bool adaptive) : entry(*r.entry) {
  const bool slices = r.traits<Pool2dProblem>().sliced;
  const program::Line& line = r.line;
  const program::Value x = r.image();
  p = Pool2dProblem{};
  p.dtype = x.dtype, p.threads = threads(), p.parameters = r.parameters();
  p.batch = x.sizes[0], p.channels = x.sizes[1], p.in_height = x.sizes[2], p.in_width = x.sizes[3];
  if (adaptive) {
    const Sizes out = line.numbers("output_size", 2);
    line.check(out[0] > 0 && out[1] > 0, "needs an output_size of at least 1");
    p.out_height = out[0], p.out_width = out[1];
  } else {
    const Sizes kernel = line.numbers("kernel_size", 2), stride = line.numbers("stride", 2), padding = line.numbers("padding", 2),
                dilation = line.numbers("dilation", 2);
    for (size_t i : {0u, 1u})
      line.check(kernel[i] > 0 && stride[i] > 0 && dilation[i] > 0 && padding[i] >= 0 && padding[i] <= kernel[i] / 2,
                 "needs kernel_size, stride and dilation of at least 1, and padding of at most half the kernel");
    p.kernel_height = kernel[0], p.kernel_width = kernel[1], p.stride_h = stride[0], p.stride_w = stride[1];
    p.pad_h = padding[0], p.pad_w = padding[1], p.dilation_h = dilation[0], p.dilation_w = dilation[1];
    p.ceil_mode = line.number_of("ceil_mode") != 0;
    p.count_include_pad = !line.has("count_include_pad") || line.number_of("count_include_pad") != 0;
    p.divisor = line.has("divisor") ? line.number_of("divisor") : 0;
    check_each({kernel[0], kernel[1], stride[0], stride[1], padding[0], padding[1], dilation[0], dilation[1]});
    set_outputs(p);
    line.check(p.out_height > 0 && p.out_width > 0, "the input " + to_string(x.sizes) + " is too small");
  }
  reads_slices = writes_slices = slices;
  r.image_output({p.batch, p.channels, p.out_height, p.out_width}, p.dtype);
}
void PoolStep::emit(program::Emitter& e) {
  const int x = e.rows(e.operand(0), program::image_order(), reads_slices);
  p.x_stride = e.image_strides(x), p.y_stride = e.image_strides(e.value);
  e.step(entry, p, {.input = e.at(x), .output = e.output()});
}

Pool2dProblem pool2d_from(const Query& q) {
  if (q.count != 16) throw std::runtime_error("ai3: a pooling query needs 16 sizes");
  const int64_t* s = q.sizes;
  if (s[6] == 0 || s[7] == 0) throw std::runtime_error("needs a stride of at least 1, got 0");
  Pool2dProblem p{};
  p.dtype = q.dtype, p.threads = threads();
  p.batch = s[0], p.channels = s[1], p.in_height = s[2], p.in_width = s[3];
  p.kernel_height = s[4], p.kernel_width = s[5], p.stride_h = s[6], p.stride_w = s[7], p.pad_h = s[8], p.pad_w = s[9];
  p.dilation_h = s[10], p.dilation_w = s[11], p.ceil_mode = s[12] != 0, p.count_include_pad = s[13] != 0, p.divisor = s[14];
  check_numel({p.batch, p.channels, p.in_height, p.in_width});
  check_each({s[4], s[5], s[6], s[7], s[8], s[9], s[10], s[11]});
  set_outputs(p);
  check_numel({p.batch, p.channels, p.out_height, p.out_width});
  set_strides(p, s[15] != 0);
  return p;
}

Pool2dProblem adaptive_pool2d_from(const Query& q) {
  if (q.count != 7) throw std::runtime_error("ai3: an adaptive pooling query needs 7 sizes");
  const int64_t* s = q.sizes;
  Pool2dProblem p{};
  p.dtype = q.dtype, p.threads = threads();
  p.batch = s[0], p.channels = s[1], p.in_height = s[2], p.in_width = s[3], p.out_height = s[4], p.out_width = s[5];
  check_numel({p.batch, p.channels, p.in_height, p.in_width});
  check_numel({p.batch, p.channels, p.out_height, p.out_width});
  set_strides(p, s[6] != 0);
  return p;
}

}  // namespace ai3::ops
