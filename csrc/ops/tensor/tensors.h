// From tensors to problems: checks, sizes, memory formats and allocation. Glue never computes.
#pragma once
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <bit>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "../../algos/core/algorithm.h"
#include "../prepare/numbers.h"
#include "../prepare/prepared.h"
#include "../dispatch/registry.h"
#include "scratch.h"
#include "stable.h"

namespace ai3::ops {

using torch::headeronly::MemoryFormat;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Sizes = std::vector<int64_t>;

// Takes the arguments of a boxed call off the stack, in order. Each must be taken, also when a later one is refused: the stack
// owns references. In a call for inference all that are not tensors are one integer, which names the numbers: PyTorch takes 0.1
// us to hand over a number and 0.6 us for a list (docs/decisions/calls.md).
//
// As long as they live, the first tensor's device is the current one: where memory comes from, kernels are launched, and the
// vendor's libraries keep their state.
class Arguments {
 public:
  explicit Arguments(StableIValue* stack, bool inference = false) : next_(stack), inference_(inference) {}
  template <class T>
  T take() {
    constexpr bool whole = std::is_same_v<T, int64_t> || std::is_same_v<T, bool> || std::is_same_v<T, std::optional<int64_t>>;
    if constexpr (whole || std::is_same_v<T, double>)
      if (inference_) {
        const Number& number = take_number();
        if (number.kind == Number::Kind::none) return T();
        if constexpr (std::is_same_v<T, double>) return number.real;
        if (number.kind == Number::Kind::whole) return T(number.whole);
        wrong_numbers();
      }
    T value = from_stack<T>(*next_++);
    if constexpr (std::is_same_v<T, Tensor>) set_device(value);
    return value;
  }
  // What follows the numbers in a call for inference.
  template <class T>
  T take_from_stack() {
    return from_stack<T>(*next_++);
  }
  Sizes take_list(size_t length) {
    if (!inference_) return take<Sizes>();
    Sizes list(length);
    for (int64_t& value : list) value = take<int64_t>();
    return list;
  }
  // The algorithm's own parameters, which come last; tensors among them go to `tensors`, at their places.
  using Own = std::array<std::optional<Tensor>, Parameters::kAtMost>;
  Parameters take_parameters(const Entry& entry, Own* tensors = nullptr) {
    Parameters all;
    for (size_t i = 0; i < entry.parameters.size(); i++) {
      const Parameter& p = entry.parameters[i];
      int64_t& to = all.values[i];
      switch (p.kind) {
        case Parameter::Kind::whole: to = take<int64_t>(); break;
        case Parameter::Kind::flag: to = take<bool>(); break;
        case Parameter::Kind::real: to = std::bit_cast<int64_t>(take<double>()); break;
        case Parameter::Kind::word: to = inference_ ? take<int64_t>() : word_of(p, take<std::string>()); break;
        case Parameter::Kind::tensor: to = 1, tensors->at(i) = take<Tensor>(); break;
        case Parameter::Kind::optional_tensor: to = (tensors->at(i) = take<std::optional<Tensor>>()).has_value(); break;
      }
    }
    return all;
  }
  // A list of any length, which among the numbers comes before it.
  Sizes take_list() {
    if (!inference_) return take<Sizes>();
    const int64_t length = take<int64_t>();
    if (length < 0 || length > 64) throw std::runtime_error("needs a list of at most 64 numbers, got " + std::to_string(length));
    return take_list(static_cast<size_t>(length));
  }

 private:
  void set_device(const Tensor& t) {
    if (std::exchange(has_device_, true) || !t.defined() || !t.is_cuda()) return;
    device_.emplace(t.get_device_index());
  }
  const Number& take_number() {
    if (!numbers_) numbers_ = numbers_known(from_stack<int64_t>(*next_++));
    if (taken_ == numbers_->list.size()) wrong_numbers();
    return numbers_->list[taken_++];
  }
  [[noreturn, gnu::noinline, gnu::cold]] void wrong_numbers() const {
    throw std::runtime_error("needs as many numbers as it has arguments, got '" + numbers_->text + "'");
  }

  StableIValue* next_;
  bool inference_;
  bool has_device_ = false;
  std::optional<torch::stable::accelerator::DeviceGuard> device_;
  std::shared_ptr<const Numbers> numbers_;
  size_t taken_ = 0;
};
template <class T>
void give(StableIValue* stack, int i, const T& value) {
  stack[i] = to_stack(value);
}

inline std::string to_string(std::span<const int64_t> sizes) {
  std::string s = "(";
  for (size_t i = 0; i < sizes.size(); i++) s += (i ? ", " : "") + std::to_string(sizes[i]);
  return s + (sizes.size() == 1 ? ",)" : ")");
}
// As long as the tensor has them.
inline std::span<const int64_t> view_of_sizes(const Tensor& t) {
  const auto sizes = t.sizes();
  return {sizes.data(), sizes.size()};
}
inline Sizes sizes_of(const Tensor& t) { return Sizes(t.sizes().begin(), t.sizes().end()); }

// Throws "ai3::<operation>_<algorithm>: " and the parts. Only here are they made into words: most calls are right.
inline std::string words(const Sizes& sizes) { return to_string(sizes); }
inline std::string words(std::span<const int64_t> sizes) { return to_string(sizes); }
inline std::string words(const Tensor& t) { return to_string(sizes_of(t)); }
template <class T>
const T& words(const T& part) {
  return part;
}
template <class... Parts>
[[noreturn, gnu::noinline, gnu::cold]] void fail(const Entry& entry, const Parts&... parts) {
  std::ostringstream s;
  s << "ai3::" << entry.operation->name << "_" << entry.name << ": ";
  (s << ... << words(parts));
  throw std::runtime_error(s.str());
}
template <class... Parts>
void check(bool ok, const Entry& entry, const Parts&... parts) {
  if (!ok) [[unlikely]]
    fail(entry, parts...);
}

// For operators that know no gradients, once their arguments are taken.
inline void check_inference(const Entry& entry) {
  check(!aoti_torch_grad_mode_is_enabled(), entry, "_infer is for inference: call it without gradients");
}

// The dtype of kernels, if they compute in it.
inline std::optional<DType> known_dtype(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Double: return DType::f64;
    case ScalarType::Float: return DType::f32;
    case ScalarType::BFloat16: return DType::bf16;
    case ScalarType::Half: return DType::f16;
    default: return std::nullopt;
  }
}
inline DType dtype_of(const Entry& entry, const Tensor& t) {
  check(t.defined(), entry, "needs a tensor, got None");
  if (const auto dtype = known_dtype(t)) return *dtype;
  fail(entry, "needs float64, float32, bfloat16 or float16 tensors, got ", torch::headeronly::toString(t.scalar_type()));
}
inline Device device_of(const Entry& entry, const Tensor& t) {
  if (t.is_cpu()) return Device::cpu;
  if (t.is_cuda()) return Device::cuda;
  fail(entry, "needs CPU or CUDA tensors, got one of sizes ", t, " on another device");
}
inline Where where_of(const Entry& entry, const Tensor& t) {
  const Device device = device_of(entry, t);
  return {device, device == Device::cuda ? t.get_device_index() : 0};
}
inline std::string device_text(const Tensor& t) {
  return t.is_cpu() ? "cpu" : t.is_cuda() ? "cuda:" + std::to_string(t.get_device_index()) : "neither CPU nor CUDA";
}
inline void check_same(const Entry& entry, const Tensor& input, const Tensor& other, const char* name) {
  check(input.defined() && other.defined(), entry, "needs tensors as input and ", name, ", got None");
  check(other.scalar_type() == input.scalar_type(), entry, "needs input and ", name, " of one dtype, got ",
        torch::headeronly::toString(input.scalar_type()), " and ", torch::headeronly::toString(other.scalar_type()));
  check(other.device() == input.device(), entry, "needs input and ", name, " on one device, got ", device_text(input), " and ",
        device_text(other));
}

// A list argument for `count` dimensions: one element stands for all of them, as in ATen.
inline void spread(const Entry& entry, Sizes& list, size_t count, const char* name) {
  if (list.size() == 1) list.resize(count, list[0]);
  check(list.size() == count, entry, name, " needs 1 or ", count, " elements, got ", list);
}
inline void check_each(const Entry& entry, const Sizes& list, int64_t least, const char* name) {
  for (int64_t v : list)
    check(v >= least && v <= INT32_MAX, entry, name, " needs values from ", least, " to ", INT32_MAX, ", got ", list);
}

// Refuses an `out` that shares memory with what is read: a kernel reads after it has begun to write. Gaps between elements count
// as theirs, unless both lie in slices, such as other channels, of what repeats with one period.
void check_apart(const Entry& entry, const Tensor& out, const Tensor& other, const char* name, const char* written = "an out");
// Refuses an `out` or a residual of other sizes than the output's, or of another dtype or device than the input's.
void check_place(const Entry& entry, const Tensor& input, const Tensor& t, const Sizes& sizes, const char* name);
// The workspace that a caller gave: refuses memory that none can lie in, or that shares some with what is read or written. That
// it is large enough, with_workspace checks.
struct Named {
  const Tensor* tensor;
  const char* name;
};
void check_workspace(const Entry& entry, const std::optional<Tensor>& workspace, std::initializer_list<Named> others);
// Raises out's version, as PyTorch's in-place operators do, and refuses what they refuse: an inference tensor outside of
// inference mode. To be called before out is written.
void mark_written(const Entry& entry, const Tensor& out);

inline bool same_strides(const Tensor& a, const Tensor& b) {
  bool same = a.dim() == b.dim();
  for (int64_t d = 0; same && d < a.dim(); d++) same = a.size(d) == b.size(d) && (a.size(d) == 1 || a.stride(d) == b.stride(d));
  return same;
}
// Whether two tensors are the same elements of memory.
inline bool same_place(const Tensor& a, const Tensor& b) {
  return a.const_data_ptr() == b.const_data_ptr() && same_strides(a, b);
}

// What ATen's suggest_memory_format says of a 4-D tensor.
inline bool suggests_channels_last(const Tensor& t) {
  if (t.dim() != 4) return false;
  int64_t least = 0;
  if (t.stride(1) == 0) return false;
  for (int d : {1, 3, 2, 0}) {
    if (t.size(d) == 0 || t.stride(d) < least || (d == 0 && least == t.stride(1))) return false;
    least = t.stride(d) * (t.size(d) > 1 ? t.size(d) : 1);
  }
  return true;
}
AI3_INLINE Strides4 dense_strides(int64_t channels, int64_t height, int64_t width, bool channels_last) {
  return channels_last ? Strides4{channels * height * width, 1, width * channels, channels}
                       : Strides4{channels * height * width, height * width, width, 1};
}
inline bool is_dense(const Tensor& t, bool channels_last) {
  const Strides4 s = dense_strides(t.size(1), t.size(2), t.size(3), channels_last);
  const int64_t want[] = {s.n, s.c, s.h, s.w};
  for (int d = 0; d < 4; d++)
    if (t.size(d) != 1 && t.stride(d) != want[d]) return false;
  return true;
}
// t's strides where it is a slice of the channels of a larger dense tensor.
inline bool slice_strides(const Tensor& t, bool channels_last, Strides4& strides) {
  const int64_t hw = t.size(2) * t.size(3), pixel = channels_last ? t.stride(3) : 1;
  const int64_t image = channels_last ? hw * pixel : t.size(1) * hw;
  strides = {t.size(0) == 1 ? image : t.stride(0), t.stride(1), t.stride(2), t.stride(3)};
  return channels_last ? strides.c == 1 && pixel >= t.size(1) && strides.h == t.size(3) * pixel && strides.n == image
                       : strides.w == 1 && strides.h == t.size(3) && strides.c == hw && strides.n >= image;
}
// Whether a 4-D out is written as NHWC: what could be either is not.
inline bool takes_channels_last(const Tensor& out) {
  Strides4 ignored;
  return slice_strides(out, true, ignored) && !slice_strides(out, false, ignored);
}
// A copy of a 4-D t, dense in NCHW or NHWC.
Tensor copied_to(const Tensor& t, bool channels_last);
// t itself or a copy, dense in NCHW or NHWC.
inline Tensor dense(const Tensor& t, bool channels_last) { return is_dense(t, channels_last) ? t : copied_to(t, channels_last); }
inline bool is_contiguous(const Tensor& t) {
  int64_t want = 1;
  for (int64_t d = t.dim() - 1; d >= 0; d--) {
    if (t.size(d) != 1 && t.stride(d) != want) return false;
    want *= t.size(d);
  }
  return true;
}
inline Tensor as_contiguous(const Tensor& t) {
  return is_contiguous(t) ? t : t.dim() == 4 ? copied_to(t, false) : torch::stable::contiguous(t);
}

// t itself or, where it begins elsewhere, a copy that begins at a multiple of 16 bytes: CUDA's vendor libraries read so much at
// once.
inline Tensor aligned(const Tensor& t) {
  const bool begins = !t.is_cuda() || std::bit_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
  return begins ? t : torch::stable::clone(t);
}

// On the device of `like`.
Tensor empty(const Sizes& sizes, ScalarType dtype, const Tensor& like, bool channels_last = false);
// On the CPU.
Tensor empty_bytes(int64_t bytes);
// With the strides of ATen's empty_like.
Tensor empty_as(const Tensor& t);
inline int64_t checked_numel(const Entry& entry, const Sizes& sizes, int64_t element_size) {
  int64_t n = element_size;
  for (int64_t s : sizes) n = checked_mul(n, s);
  check(n != kOverflow, entry, "a tensor of sizes ", sizes, " is too large");
  return n / element_size;
}

// The same for the sizes of a query, of which -1 is unknown.
void check_numel(std::initializer_list<int64_t> sizes);
// The window's numbers in a query, within what check_each lets pass.
void check_each(std::initializer_list<int64_t> numbers);

// Calls an operator of PyTorch's; `arguments` are converted in order. The stack holds the results.
template <class... A>
auto call_dispatcher(const char* name, const char* overload, const A&... arguments) {
  std::array<StableIValue, sizeof...(A)> stack{to_stack(arguments)...};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION));
  return stack;
}
// The same for one result.
template <class... A>
Tensor call_aten(const char* name, const char* overload, const A&... arguments) {
  return from_stack<Tensor>(call_dispatcher(name, overload, arguments...)[0]);
}

// A dense t with the strides that `empty` gives, also in dimensions of one element, where any stride would do.
inline Tensor with_dense_strides(const Tensor& t, bool channels_last) {
  const Strides4 s = dense_strides(t.size(1), t.size(2), t.size(3), channels_last);
  if (t.stride(0) == s.n && t.stride(1) == s.c && t.stride(2) == s.h && t.stride(3) == s.w) return t;
  return call_aten("aten::as_strided", "", t, sizes_of(t), Sizes{s.n, s.c, s.h, s.w}, std::optional<int64_t>());
}

// Set by _C_cuda when it is loaded.
extern void* (*current_cuda_stream)(int32_t device);
extern bool (*is_cuda_capturing)(void* stream);

inline int32_t threads() { return static_cast<int32_t>(torch::stable::get_num_threads()); }
// Those that `work` multiplications are worth: waking another thread takes about as long as so many do.
inline int32_t threads(int64_t work) {
  constexpr int64_t each = int64_t{1} << 16;
  return work < each ? 1 : static_cast<int32_t>(std::min<int64_t>(threads(), work / each));
}

// The workspace of one call, and what was borrowed beyond it.
struct LentWorkspace : Workspace {
  LentWorkspace(char* memory, int64_t size, const Tensor& of_device)
      : Workspace{memory, size, 0, nullptr, lend}, like(of_device) {}
  static char* lend(Workspace& workspace, int64_t bytes);
  const Tensor& like;
  std::vector<Tensor> lent;
};

// Runs run(workspace) with `bytes` of scratch memory, the caller's where it gave some; `packed` of them are taken for the
// weights, the others the algorithm stated.
template <class Run>
void with_workspace(const Entry& entry, int64_t bytes, const Tensor& like, const Run& run, int64_t packed = 0,
                    const std::optional<Tensor>& given = std::nullopt) {
  check(bytes >= 0 && bytes < (int64_t{1} << 62), entry, "needs more workspace than can be addressed");
  if (given) check(given->numel() >= bytes, entry, "needs a workspace of ", bytes, " bytes, got ", given->numel());
  const bool cuda = like.is_cuda();
  const Scratch scratch(cuda || given ? 0 : bytes);
  LentWorkspace workspace(given ? static_cast<char*>(given->mutable_data_ptr()) : scratch.data(), bytes, like);
  std::optional<Tensor> memory;
  if (cuda) {
    if (bytes > 0 && !given)
      workspace.data = static_cast<char*>(memory.emplace(empty({bytes}, ScalarType::Byte, like)).mutable_data_ptr());
    workspace.stream = current_cuda_stream(like.get_device_index());
  }
  run(workspace);
  check(workspace.used <= bytes, entry, "states ", bytes - packed, " bytes of workspace and takes ", workspace.used - packed);
}

// What a caller gives beside the arguments.
struct Given {
  std::optional<Tensor> out = {}, workspace = {};
  Parameters parameters = {};  // of the algorithm's own
};

// Runs a kernel with its workspace; weights are packed first where the algorithm packs and `packed` is false. p is the prepared
// problem, with the tensors as they lie in memory.
template <class P>
void run_kernel(const Prepared<P>& prepared, const P& given, typename P::Operands operands, const Tensor& like,
                bool packed = false, const std::optional<Tensor>& memory = std::nullopt) {
  const P& p = prepared.chosen_by_rule ? with_parameters(given, prepared.problem.parameters) : given;
  std::optional<Prepared<P>> other;
  const Prepared<P>& call =
      same_layout(prepared.problem, p) ? prepared : other.emplace(relaid(prepared, where_of(*prepared.entry, like), p));
  const Algorithm<P>& algorithm = *call.algorithm;
  if (packed || !call.pack)
    return with_workspace(
        *call.entry, call.workspace, like, [&](Workspace& workspace) { algorithm.run(p, operands, workspace); }, 0, memory);
  if constexpr (HasWeight<P>) {
    const P direct = in_direct_call(algorithm.traits, p);
    with_workspace(
        *call.entry, checked_add(call.pack, call.workspace_beside_pack), like,
        [&](Workspace& workspace) {
          void* weights = workspace.take<char>(call.pack);
          const int64_t before = workspace.used;
          algorithm.traits.pack(direct, operands.weight, weights, workspace);
          workspace.used = before;
          operands.weight = weights;
          algorithm.run(direct, operands, workspace);
        },
        call.pack, memory);
  }
}
// Whether an algorithm has a kernel for a gradient (0: the input's, 1: the weight's): then it names itself for it.
template <class P>
bool has_backward(const Entry& entry, Device device, const P& p, size_t gradient) {
  const auto* algorithm = entry.algorithm<P>(device);
  if (!algorithm || !algorithm->traits.backward || !algorithm->traits.gradients) return false;
  Reason reason;
  if (!supported(algorithm->traits, p, reason)) return false;
  const GradientNames names = algorithm->traits.gradients(p);
  const char* name = gradient ? names.weight : names.input;
  return name && entry.name == name;
}
// Runs it; gradients that are absent are not wanted.
template <class P>
void run_backward(const Chosen<P>& chosen, const P& p, const typename P::Gradients& operands, const Tensor& like) {
  const Traits<P>& traits = chosen.algorithm->traits;
  with_workspace(*chosen.entry, traits.backward_workspace ? traits.backward_workspace(p, operands) : 0, like,
                 [&](Workspace& workspace) { traits.backward(p, operands, workspace); });
}
template <class P>
void run_backward(const Chosen<P>& chosen, const P& p, const Tensor& grad, const Tensor& input, const Tensor& weight,
                  Tensor* grad_input, Tensor* grad_weight, Tensor* grad_bias) {
  auto written = [](Tensor* t) { return t ? t->mutable_data_ptr() : nullptr; };
  run_backward(chosen, p,
               {grad.const_data_ptr(), input.const_data_ptr(), weight.const_data_ptr(), written(grad_input), written(grad_weight),
                written(grad_bias)},
               input);
}

// run(x, y) on 4-D tensors as the algorithm wants them, p's strides set: one that reads a single layout gets copies in that
// layout, one that takes slices gets x as it is.
template <class P, class Run>
void run_dense(const Chosen<P>& chosen, P& p, void (*set_strides)(P&, bool channels_last), const Tensor& input, Tensor& output,
               bool channels_last, const Run& run) {
  const Layout layout = chosen.algorithm->traits.layout;
  const bool nhwc = layout == Layout::any ? channels_last : layout == Layout::nhwc;
  set_strides(p, nhwc);
  Strides4 slice;
  const bool sliced = chosen.algorithm->traits.sliced && !is_dense(input, nhwc) && slice_strides(input, nhwc, slice);
  if (sliced) p.x_stride = slice;
  const Tensor x = sliced ? input : dense(input, nhwc);
  if (nhwc == channels_last) return run(x, output);
  Tensor y = empty(sizes_of(output), output.scalar_type(), output, nhwc);
  run(x, y);
  torch::stable::copy_(output, y);
}

// Where a 4-D result is computed: in `out`, where that is given and the algorithm writes such memory, else in a tensor of its
// own.
struct Destination {
  Destination(const std::optional<Tensor>& out, bool slices, const Sizes& sizes, const Tensor& input, bool channels_last)
      : direct(out && (!out->is_cuda() || std::bit_cast<uintptr_t>(out->const_data_ptr()) % 16 == 0) &&
               (is_dense(*out, channels_last) || (slices && slice_strides(*out, channels_last, slice)))),
        tensor(direct ? *out : empty(sizes, input.scalar_type(), input, channels_last)) {}

  Strides4 slice{};  // of an `out` that has gaps
  bool direct;
  Tensor tensor;

  // The strides of y, to which the algorithm writes: run_dense may give it another one.
  void set_strides(const Tensor& y, Strides4& strides) const {
    if (direct && slice.n && y.const_data_ptr() == tensor.const_data_ptr()) strides = slice;
  }
  void copy_to(const std::optional<Tensor>& out) const {
    if (out && !direct) {
      Tensor to = *out;
      torch::stable::copy_(to, tensor);
    }
  }
};

// The activation of that name, if there is one.
std::optional<Activation> activation_called(const std::string& word);
// The word of a packed operator's `activation` argument.
Activation activation_named(const Entry& entry, const std::string& word);

// Not a rule.
template <class P>
bool is_method(const AlgorithmInfo& info) {
  return !reinterpret_cast<const Algorithm<P>&>(info).traits.choose;
}

// Packed weights are plain 1-D tensors of the weight's dtype: the algorithm's form (the weight itself where it has none) and a
// tag of what they were made for, since a pack may outlive the process, in an exported program, and meet another instruction set.
template <class P>
bool has_packs(const AlgorithmInfo& info) {
  const auto& t = reinterpret_cast<const Algorithm<P>&>(info).traits;
  return is_method<P>(info) && (t.packed_bytes || t.epilogue);
}
inline constexpr int64_t kTagBytes = 64;
uint64_t pack_tag(const Entry& entry, std::span<const int64_t> description);
Tensor new_pack(const Tensor& weight, int64_t bytes);
void tag_pack(Tensor& pack, uint64_t tag);
void check_pack(const Entry& entry, const Tensor& pack, int64_t bytes, uint64_t tag);
// The tag of a pack on the CPU; 0 where the tensor is too small to be one.
uint64_t tag_of_pack(const Tensor& pack);

template <class P>
Tensor pack_weight(const Chosen<P>& chosen, const P& p, const Tensor& weight, std::span<const int64_t> description) {
  const Traits<P>& traits = chosen.algorithm->traits;
  Tensor pack = new_pack(weight, packed_tensor_bytes(traits, p));
  if (packed_bytes_of(traits, p) > 0) {
    const Tensor whole = as_contiguous(weight);
    with_workspace(*chosen.entry, pack_workspace_of(traits, p), weight,
                   [&](Workspace& workspace) { traits.pack(p, whole.const_data_ptr(), pack.mutable_data_ptr(), workspace); });
  } else {
    Tensor place = torch::stable::narrow(pack, 0, 0, weight.numel());
    torch::stable::copy_(place, torch::stable::flatten(as_contiguous(weight)));
  }
  tag_pack(pack, pack_tag(*chosen.entry, description));
  return pack;
}

// What computes the gradients of input and weight: PyTorch's own operators where null.
using GradientEntries = std::array<const Entry*, 2>;
// Gradients that an operator returns: an empty tensor of no elements where one was not asked for.
using Gradients = std::array<Tensor, 3>;
inline void give_gradients(StableIValue* stack, const Gradients& gradients) {
  for (int i = 0; i < 3; i++) give(stack, i, gradients[static_cast<size_t>(i)]);
}

}  // namespace ai3::ops
