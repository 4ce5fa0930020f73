// What layer_norm and rms_norm share: checks of the rows that are normalized, and the way from tensors to kernels. P is the
// problem (csrc/algos/core/normalized_rows.h), `centered` or without a bias.
#pragma once
#include "normalization.h"

namespace ai3::ops {

template <class P>
struct RowNorm {
  struct Call {
    Tensor input;
    Sizes shape;
    std::optional<Tensor> weight, bias;
    double eps = 0;
    std::optional<Parameters> parameters = std::nullopt;  // of the algorithm's own
  };

  // An element takes as long as some multiplications of a product do.
  static void set_threads(P& p) { p.threads = p.rows < 0 ? threads() : threads(checked_product({p.rows, p.features, 8})); }

  static P problem_from(const Query& q, const char* what) {
    constexpr int count = P::centered ? 5 : 4;
    if (q.count != count)
      throw std::runtime_error(std::string("ai3: ") + what + " query needs " + std::to_string(count) + " sizes");
    check_numel({q.sizes[0], q.sizes[1]});
    P p{};
    p.dtype = q.dtype, p.rows = q.sizes[0], p.features = q.sizes[1], p.has_weight = q.sizes[2] != 0;
    if constexpr (P::centered) p.has_bias = q.sizes[3] != 0;
    p.wide_weight = q.sizes[count - 1] > 0;
    set_threads(p);
    return p;
  }

  // Checks the arguments as torch.nn.functional's functions do.
  static P problem(const Entry& entry, const Call& c) {
    const DType dtype = dtype_of(entry, c.input);
    const Sizes input = sizes_of(c.input);
    check(!c.shape.empty(), entry, "needs a normalized_shape of at least one dimension");
    check(input.size() >= c.shape.size() && std::equal(c.shape.rbegin(), c.shape.rend(), input.rbegin()), entry,
          "needs input whose last dimensions are ", c.shape, ", got ", input);
    const bool wide = is_wide(c.input, {&c.weight, &c.bias});
    check_weight(entry, c.input, c.weight, c.shape, "weight", wide), check_weight(entry, c.input, c.bias, c.shape, "bias", wide);
    P p{};
    p.dtype = dtype, p.features = checked_numel(entry, c.shape, 1);
    p.rows = checked_numel(entry, Sizes(input.begin(), input.end() - static_cast<std::ptrdiff_t>(c.shape.size())), 1);
    p.eps = c.eps, p.has_weight = c.weight.has_value(), p.wide_weight = wide;
    if constexpr (P::centered) p.has_bias = c.bias.has_value();
    p.parameters = c.parameters.value_or(entry.defaults);
    set_threads(p);
    return p;
  }

  // y, contiguous.
  static void run(const Entry& entry, const Call& c, Tensor& y, const std::optional<Tensor>& workspace = std::nullopt) {
    const P p = problem(entry, c);
    const Prepared<P> call = prepare(entry, where_of(entry, c.input), p, y.numel() > 0);
    if (y.numel() == 0) return;
    const Tensor x = as_contiguous(c.input), w = c.weight ? as_contiguous(*c.weight) : x, b = c.bias ? as_contiguous(*c.bias) : x;
    typename P::Operands m;
    m.input = x.const_data_ptr(), m.output = y.mutable_data_ptr();
    if (c.weight) m.weight = w.const_data_ptr();
    if constexpr (P::centered) {
      if (c.bias) m.bias = b.const_data_ptr();
    }
    run_kernel(call, p, m, x, false, workspace);
  }
  static Tensor empty_output(const Entry& entry, const Call& c) {
    dtype_of(entry, c.input);
    return empty(sizes_of(c.input), c.input.scalar_type(), c.input);
  }

  // Weight and, where there is one, bias.
  static void take_weights(Arguments& in, Call& c) {
    c.weight = in.take<std::optional<Tensor>>();
    if constexpr (P::centered) c.bias = in.take<std::optional<Tensor>>();
  }
  static void take_eps(Arguments& in, Call& c) {
    if constexpr (P::centered) {
      c.eps = in.take<double>();
    } else {  // none is, as ATen has it, the epsilon of the type that it computes in
      const bool wide = c.input.scalar_type() == ScalarType::Double;
      const double least = wide ? std::numeric_limits<double>::epsilon() : std::numeric_limits<float>::epsilon();
      c.eps = in.take<std::optional<double>>().value_or(least);
    }
  }

  template <bool inference>
  static void forward(const Entry& entry, StableIValue* stack) {
    Arguments in(stack, inference);
    Call c;
    c.input = in.take<Tensor>();
    if (!inference) c.shape = in.take_list();
    take_weights(in, c);
    if (inference)
      c.shape = in.take_list(), c.eps = in.take<double>();
    else
      take_eps(in, c);
    c.parameters = in.take_parameters(entry);
    if (inference) check_inference(entry);
    Tensor output = empty_output(entry, c);
    run(entry, c, output);
    give(stack, 0, output);
  }
  static void forward_out(const Entry& entry, StableIValue* stack) {
    Arguments in(stack);
    Call c;
    c.input = in.take<Tensor>(), c.shape = in.take_list();
    take_weights(in, c), take_eps(in, c);
    Tensor out = in.take<Tensor>();
    const auto workspace = in.take<std::optional<Tensor>>();
    c.parameters = in.take_parameters(entry);
    mark_written(entry, out);
    dtype_of(entry, c.input), check_place(entry, c.input, out, sizes_of(c.input), "out");
    check_apart(entry, out, c.input, "input");
    if (c.weight) check_apart(entry, out, *c.weight, "weight");
    if (c.bias) check_apart(entry, out, *c.bias, "bias");
    check_workspace(
        entry, workspace,
        {{&c.input, "input"}, {&out, "out"}, {c.weight ? &*c.weight : nullptr, "weight"}, {c.bias ? &*c.bias : nullptr, "bias"}});
    if (is_contiguous(out)) return run(entry, c, out, workspace);
    Tensor output = empty_output(entry, c);
    run(entry, c, output, workspace);
    torch::stable::copy_(out, output);
  }

  static void backward(const Entry& entry, StableIValue* stack) {
    constexpr int count = P::centered ? 3 : 2;  // gradients
    Arguments in(stack);
    const Tensor grad = in.take<Tensor>();
    Call c;
    c.input = in.take<Tensor>(), c.shape = in.take_list(), c.weight = in.take<std::optional<Tensor>>(), c.eps = in.take<double>();
    const auto wanted = in.take<std::vector<bool>>();
    c.parameters = in.take_parameters(entry);
    check(wanted.size() == count, entry, "needs ", count, " flags in output_mask, got ", wanted.size());
    check_same(entry, c.input, grad, "grad_output");
    P p = problem(entry, c);
    // The dtype of an absent weight's bias is not known here: float32 loses nothing, and autograd casts to a bias of 16 bits.
    if (!c.weight && size_of(p.dtype) == 2) p.wide_weight = true;
    check(sizes_of(grad) == sizes_of(c.input), entry, "needs grad_output of the input's sizes ", sizes_of(c.input), ", got ",
          grad);
    const Device device = device_of(entry, c.input);
    Chosen<P> chosen(entry, device, p);
    if (!chosen.algorithm->traits.backward) chosen = Chosen<P>(entry_named(*entry.operation, "direct"), device, p);
    const ScalarType type = c.input.scalar_type(), of_weight = p.wide_weight ? ScalarType::Float : type;
    Tensor result[count];
    for (int i = 0; i < count; i++) {
      const Sizes whole = i ? c.shape : sizes_of(c.input);
      result[i] = empty(wanted[static_cast<size_t>(i)] ? whole : Sizes{0}, i ? of_weight : type, c.input);
    }
    if (c.input.numel() > 0) {
      const Tensor gy = as_contiguous(grad), x = as_contiguous(c.input), w = c.weight ? as_contiguous(*c.weight) : x;
      auto written = [&](int i) { return i < count && wanted[static_cast<size_t>(i)] ? result[i].mutable_data_ptr() : nullptr; };
      run_backward(
          chosen, p,
          {gy.const_data_ptr(), x.const_data_ptr(), c.weight ? w.const_data_ptr() : nullptr, written(0), written(1), written(2)},
          x);
    } else {
      for (Tensor& t : result) torch::stable::zero_(t);
    }
    for (int i = 0; i < count; i++) give(stack, i, result[i]);
  }

  // A line of a program: layer_norm_<algorithm> %x dims=1 eps=1e-05 weight=$0 bias=$1; over the last `dims` dimensions.
  struct Step final : program::Step {
    P p{};
    const Entry& entry;

    explicit Step(program::Reader& r) : entry(*r.entry) {
      r.traits<P>();
      r.needs_operands(1);
      const program::Value x = r.operand(0);
      const int64_t dims = r.line.number_of("dims"), rank = static_cast<int64_t>(x.sizes.size());
      r.line.check(dims > 0 && dims <= rank, "needs dims of the input's, got " + to_string(x.sizes));
      const auto first = x.sizes.end() - static_cast<std::ptrdiff_t>(dims);
      p.dtype = x.dtype, p.rows = program::count_of(Sizes(x.sizes.begin(), first));
      p.features = program::count_of(Sizes(first, x.sizes.end())), p.eps = r.line.real("eps");
      p.has_weight = r.line.has("weight"), p.parameters = r.parameters();
      if constexpr (P::centered) p.has_bias = r.line.has("bias");
      set_threads(p);
      r.elements("weight", p.dtype, p.features);
      if constexpr (P::centered) r.elements("bias", p.dtype, p.features);
      r.rows_output(x.sizes, x.dtype);
    }
    void emit(program::Emitter& e) override {
      const int x = e.rows(e.operand(0), e.of(e.value).order, false);
      if constexpr (P::centered)
        e.step(entry, p, {.input = e.at(x), .weight = e.constant("weight"), .bias = e.constant("bias"), .output = e.output()});
      else
        e.step(entry, p, {.input = e.at(x), .weight = e.constant("weight"), .output = e.output()});
    }
  };

  // A user's algorithm, which has no kernel for gradients, gets PyTorch's.
  static bool has_gradients(const AlgorithmInfo& info) {
    const auto& traits = reinterpret_cast<const Algorithm<P>&>(info).traits;
    return traits.backward || traits.choose;
  }
};

}  // namespace ai3::ops
