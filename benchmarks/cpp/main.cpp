// Microbenchmarks: each algorithm's kernel on the problem structs, without the dispatcher, and PyTorch's own operator beside it.
//
//   ai3_bench [--threads=2] [--dtype=f32] [--layout=nhwc,nchw] [--shapes=benchmarks/shapes]
//   --benchmark_filter='conv2d/.*/C256_.*'
//
// Names carry everything: conv2d/winograd_f4/f32/nhwc/N1_C256_H56_K256_k3s1p1. Weights are packed outside the timed loop, as
// in a deployed model. Every result is compared with PyTorch's before it is timed. Counters: effective FLOP/s (2 per multiply-add
// of the direct method, whatever the algorithm executes) and its share of the FMA peak measured at start; bytes/s where no flops
// are. machine/... are rates of the machine itself.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <benchmark/benchmark.h>
#include <c10/core/InferenceMode.h>

#include <cstdlib>
#include <iostream>
#include <sstream>

#include "../../csrc/algos/adaptive_avg_pool2d/problem.h"
#include "../../csrc/algos/avg_pool2d/problem.h"
#include "../../csrc/algos/conv1d/problem.h"
#include "../../csrc/algos/core/level.h"
#include "../../csrc/algos/flatten/problem.h"
#include "../../csrc/algos/layer_norm/problem.h"
#include "../../csrc/algos/linear/problem.h"
#include "../../csrc/algos/max_pool2d/problem.h"
#include "../../csrc/algos/relu/problem.h"
#include "machine.h"
#include "shapes.h"

extern "C" {
extern const ai3::AlgorithmInfo* const __start_ai3_algorithms[];
extern const ai3::AlgorithmInfo* const __stop_ai3_algorithms[];
}

namespace ai3::bench {
namespace {

struct Options {
  int threads = at::get_num_threads();
  std::string shapes = AI3_SHAPES;
  std::vector<std::string> dtypes{"f32"}, layouts{"nhwc", "nchw"};
};

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> parts;
  std::istringstream in(list);
  for (std::string part; std::getline(in, part, ',');) parts.push_back(part);
  return parts;
}

struct Type {
  const char* name;
  DType dtype;
  at::ScalarType scalar;
};
constexpr Type kTypes[] = {{"f64", DType::f64, at::kDouble},
                           {"f32", DType::f32, at::kFloat},
                           {"bf16", DType::bf16, at::kBFloat16},
                           {"f16", DType::f16, at::kHalf}};
const Type& type_named(const std::string& name) {
  for (const Type& t : kTypes)
    if (name == t.name) return t;
  throw std::runtime_error("--dtype: " + name + " is none of f64, f32, bf16, f16");
}

double peak_flops = 0;  // of all threads, measured at start

// What is timed: the problem, its tensors, PyTorch's function, and the work that it is.
template <class P>
struct Case {
  std::string shape;  // the last part of the name
  P problem{};
  at::Tensor input, weight, bias, output;
  std::function<at::Tensor()> reference;
  double flops = 0, bytes = 0;
};

void count(benchmark::State& state, double flops, double bytes) {
  using benchmark::Counter;
  if (flops > 0) {
    state.counters["FLOPS"] = Counter(flops, Counter::kIsIterationInvariantRate);
    state.counters["peak"] = Counter(flops / peak_flops, Counter::kIsIterationInvariantRate);
  } else {
    state.counters["bytes"] = Counter(bytes, Counter::kIsIterationInvariantRate);
  }
}

// max|y - y64| / max|y64| in the terms of the dtype and the method: enough to see that the right thing is timed.
bool agrees(const at::Tensor& got, const at::Tensor& want, bool approximate = false) {
  const double scale = want.to(at::kDouble).abs().max().item<double>();
  const double error = (got.to(at::kDouble) - want.to(at::kDouble)).abs().max().item<double>();
  return error <= (approximate || want.element_size() == 2 ? 5e-2 : 1e-3) * (scale > 0 ? scale : 1);
}

char* aligned(const at::Tensor& bytes) {
  const auto address = reinterpret_cast<uintptr_t>(bytes.data_ptr());
  return reinterpret_cast<char*>((address + 63) / 64 * 64);
}

template <class P>
void time_kernel(benchmark::State& state, const Algorithm<P>& a, const Case<P>& c) {
  const c10::InferenceMode guard;
  const int64_t packed_bytes = a.traits.packed_bytes ? a.traits.packed_bytes(c.problem) : 0;
  const int64_t own = a.traits.workspace ? a.traits.workspace(c.problem) : 0;
  const at::Tensor packed = at::empty({packed_bytes + 64}, at::kByte), memory = at::empty({own + 64}, at::kByte);
  auto pointer = [](const at::Tensor& t) -> const void* { return t.defined() ? t.const_data_ptr() : nullptr; };
  typename P::Operands operands;
  operands.input = pointer(c.input), operands.output = c.output.data_ptr();
  if constexpr (requires { operands.weight; }) {
    operands.weight = pointer(c.weight), operands.bias = pointer(c.bias);
    if (packed_bytes) {
      const int64_t bytes = a.traits.pack_workspace ? a.traits.pack_workspace(c.problem) : 0;
      const at::Tensor scratch = at::empty({bytes + 64}, at::kByte);
      Workspace workspace{aligned(scratch), bytes, 0, nullptr};
      a.traits.pack(c.problem, operands.weight, aligned(packed), workspace);
      operands.weight = aligned(packed);
    }
  }
  auto run = [&] {
    Workspace workspace{aligned(memory), own, 0, nullptr};
    a.run(c.problem, operands, workspace);
  };
  run();
  const bool approximate = a.traits.accuracy == Accuracy::approximate;
  if (!agrees(c.output, c.reference(), approximate)) return state.SkipWithError("differs from PyTorch's result");
  for (auto _ : state) {
    run();
    benchmark::ClobberMemory();
  }
  count(state, c.flops, c.bytes);
}

template <class P>
void time_torch(benchmark::State& state, const std::function<at::Tensor()>& function, const Case<P>& c) {
  if (!agrees(function(), c.reference())) return state.SkipWithError("differs from PyTorch's result");
  for (auto _ : state) benchmark::DoNotOptimize(function());
  count(state, c.flops, c.bytes);
}

// Registers every algorithm of the best level (or AI3_OPS_ISA's) and PyTorch's own operator for one case. `make` builds the
// tensors when the benchmark runs, so that only what the filter picks takes memory.
template <class P>
void add(const std::string& operation, const std::string& variant, const std::string& shape, const P& sizes,
         const std::function<Case<P>()>& make) {
  auto name = [&](const std::string& algorithm) { return operation + "/" + algorithm + "/" + variant + "/" + shape; };
  for (auto record = __start_ai3_algorithms; record != __stop_ai3_algorithms; record++) {
    const AlgorithmInfo& info = **record;
    if (operation != info.operation || std::string(info.level) != level()) continue;
    const auto& a = reinterpret_cast<const Algorithm<P>&>(info);
    Reason reason;
    if (!a.run || !(a.traits.dtypes & dtype_bit(sizes.dtype)) || (a.traits.supports && !a.traits.supports(sizes, reason)))
      continue;
    // By the variant's name: the strides of a 1x1 output are those of both layouts.
    if (a.traits.layout != Layout::any && (a.traits.layout == Layout::nhwc) != variant.ends_with("nhwc")) continue;
    benchmark::RegisterBenchmark(name(info.name).c_str(), [&a, make](benchmark::State& s) {
      time_kernel(s, a, make());
    })->UseRealTime();
  }
  benchmark::RegisterBenchmark(name("torch").c_str(), [make](benchmark::State& s) {
    const c10::InferenceMode guard;
    const Case<P> c = make();
    time_torch(s, c.reference, c);
  })->UseRealTime();
}

std::string join(const std::vector<int64_t>& pair) {
  return pair[0] == pair[1] ? std::to_string(pair[0]) : std::to_string(pair[0]) + "x" + std::to_string(pair[1]);
}
Strides4 dense(int64_t c, int64_t h, int64_t w, bool nhwc) {
  return nhwc ? Strides4{c * h * w, 1, w * c, c} : Strides4{c * h * w, h * w, w, 1};
}
at::MemoryFormat format(bool nhwc) { return nhwc ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous; }

void add_conv2d(const Shape& s, const Type& type, const std::string& layout, int threads) {
  const bool nhwc = layout == "nhwc";
  const auto kernel = s.pair("kernel"), stride = s.pair("stride"), pad = s.pair("pad"), dilation = s.pair("dilation");
  Conv2dProblem p{};
  p.dtype = type.dtype, p.threads = threads;
  p.batch = s["N"], p.in_channels = s["C"], p.in_height = s["H"], p.in_width = s["W"], p.out_channels = s["K"];
  p.kernel_height = kernel[0], p.kernel_width = kernel[1], p.stride_h = stride[0], p.stride_w = stride[1];
  p.pad_h = pad[0], p.pad_w = pad[1], p.dilation_h = dilation[0], p.dilation_w = dilation[1], p.groups = s["groups"];
  p.out_height = (p.in_height + 2 * pad[0] - dilation[0] * (kernel[0] - 1) - 1) / stride[0] + 1;
  p.out_width = (p.in_width + 2 * pad[1] - dilation[1] * (kernel[1] - 1) - 1) / stride[1] + 1;
  p.has_bias = true;
  p.x_stride = dense(p.in_channels, p.in_height, p.in_width, nhwc);
  p.y_stride = dense(p.out_channels, p.out_height, p.out_width, nhwc);
  std::ostringstream name;
  name << "N" << p.batch << "_C" << p.in_channels << "_H" << join({p.in_height, p.in_width}) << "_K" << p.out_channels << "_k"
       << join(kernel) << "s" << join(stride) << "p" << join(pad);
  if (dilation[0] * dilation[1] != 1) name << "d" << join(dilation);
  if (p.groups != 1) name << "_g" << p.groups;
  auto make = [=] {
    Case<Conv2dProblem> c;
    c.problem = p;
    c.input = at::randn({p.batch, p.in_channels, p.in_height, p.in_width}).to(type.scalar).contiguous(format(nhwc));
    c.weight = (at::randn({p.out_channels, p.in_channels / p.groups, kernel[0], kernel[1]}) * 0.1).to(type.scalar);
    c.bias = at::randn({p.out_channels}).to(type.scalar);
    c.output = at::empty({p.batch, p.out_channels, p.out_height, p.out_width}, c.input.options(), format(nhwc));
    c.reference = [x = c.input, w = c.weight.contiguous(format(nhwc)), b = c.bias, stride, pad, dilation, groups = p.groups] {
      return at::conv2d(x, w, b, stride, pad, dilation, groups);
    };
    c.flops = 2.0 * p.batch * p.out_channels * p.out_height * p.out_width * (p.in_channels / p.groups) * kernel[0] * kernel[1];
    return c;
  };
  add<Conv2dProblem>("conv2d", std::string(type.name) + "/" + layout, name.str(), p, make);

  // The strongest peer: oneDNN with weights reordered beforehand, as torch.compile's freezing calls it.
  if (p.groups != 1 && p.groups != p.in_channels) return;
  const std::string peer = std::string("conv2d/onednn_prepacked/") + type.name + "/" + layout + "/" + name.str();
  benchmark::RegisterBenchmark(peer.c_str(), [=](benchmark::State& state) {
    const c10::InferenceMode guard;
    const auto c = make();
    auto& dispatcher = c10::Dispatcher::singleton();
    static const auto reorder = dispatcher.findSchemaOrThrow("mkldnn::_reorder_convolution_weight", "");
    static const auto convolve = dispatcher.findSchemaOrThrow("mkldnn::_convolution_pointwise", "");
    auto call = [](const c10::OperatorHandle& op, std::vector<c10::IValue> stack) {
      op.callBoxed(&stack);
      return stack[0].toTensor();
    };
    const at::Tensor weight = call(reorder, {c.weight, pad, stride, dilation, p.groups,
                                             std::vector<int64_t>{p.batch, p.in_channels, p.in_height, p.in_width}});
    time_torch<Conv2dProblem>(
        state,
        [&] {
          return call(convolve, {c.input, weight, c.bias, pad, stride, dilation, p.groups, "none",
                                 c10::List<std::optional<at::Scalar>>(), std::optional<std::string>()});
        },
        c);
  })->UseRealTime();
}

void add_linear(const Shape& s, const Type& type, int threads) {
  LinearProblem p{};
  p.dtype = type.dtype, p.threads = threads, p.rows = s["M"], p.in_features = s["K"], p.out_features = s["N"], p.has_bias = true;
  p = with_dense_rows(p);
  const std::string name =
      "M" + std::to_string(p.rows) + "_K" + std::to_string(p.in_features) + "_N" + std::to_string(p.out_features);
  add<LinearProblem>("linear", type.name, name, p, [=] {
    Case<LinearProblem> c;
    c.problem = p;
    c.input = at::randn({p.rows, p.in_features}).to(type.scalar);
    c.weight = (at::randn({p.out_features, p.in_features}) * 0.1).to(type.scalar);
    c.bias = at::randn({p.out_features}).to(type.scalar);
    c.output = at::empty({p.rows, p.out_features}, c.input.options());
    c.reference = [x = c.input, w = c.weight, b = c.bias] { return at::linear(x, w, b); };
    c.flops = 2.0 * p.rows * p.in_features * p.out_features;
    return c;
  });
}

void add_pool2d(const Shape& s, const Type& type, const std::string& layout, int threads) {
  const bool nhwc = layout == "nhwc", adaptive = s.operation == "adaptive_avg_pool2d";
  Pool2dProblem p{};
  p.dtype = type.dtype, p.threads = threads;
  p.batch = s["N"], p.channels = s["C"], p.in_height = s["H"], p.in_width = s["W"];
  std::vector<int64_t> kernel, stride, pad, out;
  std::string name = "N" + std::to_string(p.batch) + "_C" + std::to_string(p.channels) + "_H" + join({p.in_height, p.in_width});
  bool ceil = false;
  if (adaptive) {
    out = s.pair("out");
    name += "_o" + join(out);
  } else {
    kernel = s.pair("kernel"), stride = s.pair("stride"), pad = s.pair("pad"), ceil = s["ceil"] != 0;
    p.kernel_height = kernel[0], p.kernel_width = kernel[1], p.stride_h = stride[0], p.stride_w = stride[1];
    p.pad_h = pad[0], p.pad_w = pad[1], p.dilation_h = p.dilation_w = 1, p.ceil_mode = ceil, p.count_include_pad = true;
    name += "_k" + join(kernel) + "s" + join(stride) + "p" + join(pad);
  }
  const std::string operation = s.operation;
  auto reference = [=](const at::Tensor& x) {
    return adaptive                    ? at::adaptive_avg_pool2d(x, out)
           : operation == "max_pool2d" ? at::max_pool2d(x, kernel, stride, pad, {1, 1}, ceil)
                                       : at::avg_pool2d(x, kernel, stride, pad, ceil);
  };
  const auto like = reference(at::zeros({1, 1, p.in_height, p.in_width}));
  p.out_height = like.size(2), p.out_width = like.size(3);
  p.x_stride = dense(p.channels, p.in_height, p.in_width, nhwc);
  p.y_stride = dense(p.channels, p.out_height, p.out_width, nhwc);
  add<Pool2dProblem>(operation, std::string(type.name) + "/" + layout, name, p, [=] {
    Case<Pool2dProblem> c;
    c.problem = p;
    c.input = at::randn({p.batch, p.channels, p.in_height, p.in_width}).to(type.scalar).contiguous(format(nhwc));
    c.output = at::empty({p.batch, p.channels, p.out_height, p.out_width}, c.input.options(), format(nhwc));
    c.reference = [reference, x = c.input] { return reference(x); };
    c.bytes = static_cast<double>(c.input.nbytes() + c.output.nbytes());
    return c;
  });
}

void add_elementwise(const Shape& s, const Type& type, int threads) {
  const ElementwiseProblem p = contiguous_elements(type.dtype, threads, s["count"]);
  add<ElementwiseProblem>(s.operation, type.name, "n" + std::to_string(p.count), p, [=] {
    Case<ElementwiseProblem> c;
    c.problem = p;
    c.input = at::randn({p.count}).to(type.scalar);
    c.output = at::empty_like(c.input);
    // PyTorch's flatten is a view: beside our copy stands PyTorch's copy.
    c.reference = [x = c.input, relu = s.operation == "relu"] { return relu ? at::relu(x) : x.clone(); };
    c.bytes = 2.0 * static_cast<double>(c.input.nbytes());
    return c;
  });
}

Options parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; i++) {
    const std::string a = argv[i];
    const size_t equals = a.find('=');
    const std::string key = a.substr(0, equals), value = equals == std::string::npos ? "" : a.substr(equals + 1);
    if (key == "--threads")
      o.threads = std::stoi(value);
    else if (key == "--shapes")
      o.shapes = value;
    else if (key == "--dtype")
      o.dtypes = split(value);
    else if (key == "--layout")
      o.layouts = split(value);
    else
      throw std::runtime_error("unknown option " + a);
  }
  return o;
}

int run(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  const Options o = parse(argc, argv);
  at::set_num_threads(o.threads);
  const Machine machine = measure_machine(o.threads);
  peak_flops = machine.flops;
  auto gigas = [](double v) { return std::to_string(static_cast<int64_t>(v / 1e9)); };
  benchmark::AddCustomContext("instruction set", level() + (level_has_matrix_tiles() ? " and AMX" : ""));
  benchmark::AddCustomContext("threads", std::to_string(o.threads));
  benchmark::AddCustomContext("FMA peak, GFLOP/s", gigas(machine.flops));
  benchmark::AddCustomContext("read bandwidth, GB/s", gigas(machine.bytes));
  add_machine(o.threads);
  for (const Shape& s : read_shapes(o.shapes))
    for (const std::string& dtype : o.dtypes) {
      const Type& type = type_named(dtype);
      if (s.operation == "linear")
        add_linear(s, type, o.threads);
      else if (s.operation == "relu" || s.operation == "flatten")
        add_elementwise(s, type, o.threads);
      else
        for (const std::string& layout : o.layouts)
          if (s.operation == "conv2d")
            add_conv2d(s, type, layout, o.threads);
          else if (s.operation.ends_with("pool2d"))
            add_pool2d(s, type, layout, o.threads);
          else
            throw std::runtime_error("benchmark shape: no operation " + s.operation);
    }
  const size_t ran = benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  if (ran == 0) std::cerr << "no benchmark matches the filter\n";
  return ran == 0;
}

}  // namespace
}  // namespace ai3::bench

int main(int argc, char** argv) try { return ai3::bench::run(argc, argv); } catch (const std::exception& e) {
  std::cerr << "ai3_bench: " << e.what() << "\n";
  return 2;
}
