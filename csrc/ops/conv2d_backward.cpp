// Gradients of conv2d: by the algorithm's kernel for them or, where it has none, as convolutions of rearranged tensors, which are
// only views and copies here. See docs/decisions/backward.md.
#include "conv2d.h"
#include "tensor/onednn.h"

namespace ai3::ops {
namespace {

// Whether PyTorch's gradient of the weight is wrong on the CPU, endless, or writes where it must not (docs/pytorch.md): of 1x1
// with a stride, in channels_last, oneDNN gathers the pixels that count into a buffer of as many channels as there are, but looks
// for the next ones as if each had a whole vector of them. Its AVX-512 kernels do so in bfloat16, too.
bool loses_its_place(const Conv2dProblem& p, bool channels_last) {
  const int64_t vector = onednn_wide_vector();
  const bool has_kernel = p.dtype == DType::f32 || (p.dtype == DType::bf16 && vector == 16);
  return has_kernel && channels_last && p.groups == 1 && p.kernel_height == 1 && p.kernel_width == 1 &&
         (p.stride_h > 1 || p.stride_w > 1) && p.in_channels < vector;
}

// Whether no pixel of the input meets some element of the kernel: at every place of the window it lies on the padding.
bool meets_only_padding(const Conv2dProblem& p) {
  auto misses = [](int64_t size, int64_t kernel, int64_t stride, int64_t pad, int64_t dilation, int64_t outputs) {
    for (int64_t k = 0; k < kernel; k++) {
      const int64_t begin = pad - k * dilation, last = size - 1 + begin;  // of the places, times the stride
      if (last < 0 || (begin > 0 ? ceil_div(begin, stride) : 0) > std::min(outputs - 1, last / stride)) return true;
    }
    return false;
  };
  return misses(p.in_height, p.kernel_height, p.stride_h, p.pad_h, p.dilation_h, p.out_height) ||
         misses(p.in_width, p.kernel_width, p.stride_w, p.pad_w, p.dilation_w, p.out_width);
}

// Whether PyTorch's gradient of the weight reads what was never written, in channels_last: oneDNN's AVX-512 kernels do with a
// dilation where the last vector of channels is not full (docs/pytorch.md).
bool reads_past_channels(const Conv2dProblem& p) {
  return p.dtype == DType::bf16 && onednn_wide_vector() == 16 && (p.dilation_h > 1 || p.dilation_w > 1) && p.stride_h == 1 &&
         p.stride_w == 1 && p.in_channels / p.groups % 16 != 0;
}

Tensor permuted(const Tensor& t, const Sizes& order) { return torch::stable::permute(t, order); }
Tensor reshaped(const Tensor& t, const Sizes& sizes) { return torch::stable::reshape(t, sizes); }
Tensor slice(const Tensor& t, int64_t dim, int64_t start, int64_t end, int64_t step = 1) {
  return call_aten("aten::slice", "Tensor", t, dim, std::optional<int64_t>(start), std::optional<int64_t>(end), step);
}
// (g * a, b, ...) as (g * b, a, ...): exchanges channels within each group.
Tensor exchange_in_groups(const Tensor& t, int64_t groups) {
  const int64_t a = t.size(0) / groups, b = t.size(1);
  return reshaped(permuted(reshaped(t, {groups, a, b, t.size(2), t.size(3)}), {0, 2, 1, 3, 4}),
                  {groups * b, a, t.size(2), t.size(3)});
}

// Puts grad's row j at row left + step * j of `size` rows (and columns alike), the others 0; what falls outside is cropped.
Tensor spread_out(const Tensor& grad, const Sizes& left, const Sizes& step, const Sizes& size) {
  Tensor spread = empty({grad.size(0), grad.size(1), size[0], size[1]}, grad.scalar_type(), grad);
  torch::stable::zero_(spread);
  Tensor to = spread, from = grad;
  for (size_t i : {0u, 1u}) {
    const int64_t dim = static_cast<int64_t>(i) + 2;
    const int64_t begin = left[i] < 0 ? ceil_div(-left[i], step[i]) : 0;
    const int64_t room = size[i] - 1 - left[i];
    int64_t end = room < 0 ? 0 : room / step[i] + 1;
    if (end > grad.size(dim)) end = grad.size(dim);
    if (end <= begin) return spread;
    from = slice(from, dim, begin, end);
    to = slice(to, dim, left[i] + step[i] * begin, left[i] + step[i] * (end - 1) + 1, step[i]);
  }
  torch::stable::copy_(to, from);
  return spread;
}

// dX = dY, with stride - 1 zeros between its elements, convolved with the weights turned by 180 degrees.
Tensor backward_of_input(const Entry& by, const Conv2dCall& c, const Conv2dProblem& p, const Tensor& grad) {
  Conv2dCall t;
  t.weight = call_aten("aten::flip", "", exchange_in_groups(c.weight, p.groups), Sizes{2, 3});
  t.stride = {1, 1}, t.dilation = c.dilation, t.groups = p.groups, t.allow_tf32 = c.allow_tf32, t.deterministic = c.deterministic;
  const Sizes reach = {p.dilation_h * (p.kernel_height - 1), p.dilation_w * (p.kernel_width - 1)};
  const Sizes left = {reach[0] - p.pad_h, reach[1] - p.pad_w};
  if (p.stride_h == 1 && p.stride_w == 1 && left[0] >= 0 && left[1] >= 0) {
    t.input = grad, t.padding = left;
  } else {
    t.input = spread_out(grad, left, c.stride, {p.in_height + reach[0], p.in_width + reach[1]});
    t.padding = {0, 0};
  }
  return conv2d_run(by, t);
}

// dW: input and dY with batch and channels exchanged, dY as the weight, stride and dilation exchanged.
Tensor backward_of_weight(const Entry& by, const Conv2dCall& c, const Conv2dProblem& p, const Tensor& grad) {
  Conv2dCall t;
  const int64_t cg = p.in_channels / p.groups;
  // (N, g * C/g, H, W) as (C/g, g * N, H, W)
  t.input = reshaped(permuted(reshaped(c.input, {p.batch, p.groups, cg, p.in_height, p.in_width}), {2, 1, 0, 3, 4}),
                     {cg, p.groups * p.batch, p.in_height, p.in_width});
  t.weight = permuted(grad, {1, 0, 2, 3});
  t.stride = c.dilation, t.dilation = c.stride, t.padding = c.padding, t.groups = p.groups;
  t.allow_tf32 = c.allow_tf32, t.deterministic = c.deterministic;
  const Tensor result = conv2d_run(by, t);  // (C/g, K, at least R, at least S)
  return permuted(slice(slice(result, 2, 0, p.kernel_height), 3, 0, p.kernel_width), {1, 0, 2, 3});
}

template <class Compute>
void named(const char* what, const Compute& compute) {
  try {
    compute();
  } catch (const std::runtime_error& e) {
    throw std::runtime_error(std::string(what) + e.what());
  }
}

}  // namespace

Gradients conv2d_backward(const Entry& asked, Conv2dCall& c, const Tensor& grad_output, const std::vector<bool>& wanted,
                          GradientEntries by) {
  check(wanted.size() == 3, asked, "needs 3 flags in output_mask, got ", wanted.size());
  check_same(asked, c.input, c.weight, "weight");
  check_same(asked, c.input, grad_output, "grad_output");
  Conv2dProblem p = conv2d_problem(asked, c, sizes_of(c.weight));
  const Tensor grad = c.unbatched && grad_output.dim() == 3 ? torch::stable::unsqueeze(grad_output, 0) : grad_output;
  const Sizes sizes = {p.batch, p.out_channels, p.out_height, p.out_width};
  check(sizes_of(grad) == sizes, asked, "needs grad_output of the output's sizes ", sizes, ", got ", grad_output);
  const bool like_weight = suggests_channels_last(c.weight), channels_last = suggests_channels_last(c.input) || like_weight;
  p.x_stride = dense_strides(p.in_channels, p.in_height, p.in_width, channels_last);
  p.y_stride = dense_strides(p.out_channels, p.out_height, p.out_width, channels_last);
  auto nothing = [&] { return empty({0}, c.input.scalar_type(), c.input); };  // one each: results must not alias
  Gradients result{nothing(), nothing(), nothing()};
  const Device device = device_of(asked, c.input);
  const bool by_patches = !by[1] && device == Device::cpu && loses_its_place(p, channels_last);
  if (by_patches) by[1] = &entry_named(Conv2dOperation::operation(), "implicit_gemm");
  bool by_aten[] = {false, false, false};
  for (size_t i : {0u, 1u}) {
    if (!wanted[i]) continue;
    if (!by[i] || p.batch == 0) {
      by_aten[i] = true;
      continue;
    }
    named(i ? "gradient of the weight: " : "gradient of the input: ", [&] {
      if ((i && by_patches) || has_backward(*by[i], device, p, i)) {
        const Chosen<Conv2dProblem> chosen(*by[i], device, p);
        const Tensor gy = dense(grad, channels_last), x = dense(c.input, channels_last), w = as_contiguous(c.weight);
        const bool bias = i && wanted[2];
        if (bias) result[2] = empty({p.out_channels}, c.input.scalar_type(), c.input);
        result[i] = i ? empty(sizes_of(w), w.scalar_type(), w) : empty(sizes_of(x), x.scalar_type(), x, channels_last);
        run_backward(chosen, p, gy, x, w, i ? nullptr : &result[0], i ? &result[1] : nullptr, bias ? &result[2] : nullptr);
      } else {
        result[i] = i ? backward_of_weight(*by[1], c, p, grad) : backward_of_input(*by[0], c, p, grad);
      }
    });
  }
  if (by_aten[0] || by_aten[1]) {
    // oneDNN writes the bias's gradient in whole vectors of bfloat16, over the end of it (docs/pytorch.md).
    const bool is_safe = p.dtype != DType::bf16 || p.out_channels % 16 == 0;
    by_aten[2] = by_aten[1] && wanted[2] && is_safe;
    // On the CPU, other strides than those of dense operands in one format, and the strides that a single channel may have in
    // channels_last, send PyTorch's kernels astray; in 16 bits and channels_last they do not write the gradient of what meets
    // only padding, nor read what they should with a dilation (docs/pytorch.md).
    const bool is_wrong = (size_of(p.dtype) == 2 && meets_only_padding(p)) || reads_past_channels(p);
    const bool format = channels_last && p.in_channels > 1 && !is_wrong;
    auto operand = [&](const Tensor& t) { return device == Device::cpu ? with_dense_strides(dense(t, format), format) : t; };
    auto stack = call_dispatcher("aten::convolution_backward", "", operand(grad), operand(c.input), operand(c.weight),
                                 std::optional<Sizes>(Sizes{p.out_channels}), c.stride, c.padding, c.dilation, false, Sizes{0, 0},
                                 c.groups, torch::headeronly::HeaderOnlyArrayRef<bool>(by_aten, 3));
    for (size_t i = 0; i < 3; i++) {
      Tensor t = from_stack<Tensor>(stack[i]);
      if (by_aten[i]) result[i] = t;
    }
  }
  if (wanted[2] && result[2].numel() == 0)
    result[2] =
        call_aten("aten::sum", "dim_IntList", grad, std::optional<Sizes>(Sizes{0, 2, 3}), false, std::optional<ScalarType>());
  if (wanted[0]) result[0] = dense(result[0], channels_last);
  if (wanted[1]) result[1] = dense(result[1], like_weight);
  if (wanted[0] && c.unbatched) result[0] = torch::stable::squeeze(result[0], 0);
  return result;
}

}  // namespace ai3::ops
