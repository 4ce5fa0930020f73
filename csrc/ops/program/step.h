// How a line of a program becomes steps. Each kind of line is a class of its own, in its operation's file: the constructor reads
// the line (what it needs, the sizes of its value), `emit` hands over the prepared call once it is known where everything lies.
//
//   struct LayerNormStep final : program::Step {
//     explicit LayerNormStep(program::Reader& r);
//     void emit(program::Emitter& e) override;
//   };
//   AI3_STEPS(layer_norm, LayerNormStep)      lines "layer_norm_<algorithm>"; AI3_STEP(name, ...): lines "name"
//
// Programs themselves name no operation: the kinds are found in an ELF section, as algorithms are.
#pragma once
#include <memory>

#include "../prepare/packs.h"
#include "../prepare/prepared.h"
#include "plan.h"
#include "text.h"
#include "values.h"

namespace ai3::ops::program {

class Planner;

// What numbers beside a value of this type are in: scales, shifts and slopes.
inline DType accumulator(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

// A line with the values that it reads.
class Reader {
 public:
  Reader(Planner& planner, const Line& text, const Entry* algorithm) : line(text), entry(algorithm), planner_(planner) {}
  const Line& line;
  const Entry* const entry;  // of lines "<operation>_<algorithm>": its algorithm

  // The algorithm's record: it has a kernel, and one that does not need planes.
  template <class P>
  const Traits<P>& traits() const {
    const auto* algorithm = entry->algorithm<P>(where().device);
    line.check(algorithm && algorithm->run, "needs an algorithm with a kernel of its own on this device");
    line.check(algorithm->traits.layout != Layout::nchw, "computes in NCHW; programs keep images in NHWC");
    return algorithm->traits;
  }
  Parameters parameters() const;  // of the algorithm's own
  Where where() const;
  void needs_operands(size_t count) const;
  const Value& operand(size_t i) const;          // of numbers
  const Value& any_operand(size_t i) const;      // or a mask of booleans, which steps read as it lies
  const Value& named(const char* option) const;  // an option's value
  // The first operand, the only one, as (N, C, H, W).
  const Value& image() const;

  // What a constant must be; the same in all lines that read it.
  void constant(const char* name, int64_t bytes, uint64_t tag);
  void elements(const char* name, DType dtype, int64_t count);  // if the line has it
  template <class P>
  void weight(const P& p) {
    const Traits<P>& traits = entry->algorithm<P>(where().device)->traits;
    line.check(line.has("weight"), "needs weight");
    if (traits.packed_bytes || traits.epilogue)
      return constant("weight", packed_tensor_bytes(traits, p), pack_tag(*entry, pack_description(p)));
    int64_t count = 1;
    for (const int64_t size : weight_sizes(p)) count = checked_mul(count, size);
    elements("weight", p.dtype, count);
  }
  Activation activation(DType dtype, int64_t channels);  // with its slopes
  // Activation and residual of a product, where it fuses them.
  template <class P>
  void epilogue(P& p, int64_t channels) {
    p.activation = activation(p.dtype, channels), p.has_residual = line.has("residual");
    line.check(traits<P>().epilogue || (!p.has_residual && p.activation == Activation::none),
               entry->name + " fuses no residual and no activation");
  }

  // The sizes of the line's value, and the order in which it is written: that of images, or as its dimensions come.
  void output(Sizes sizes, DType dtype, Sizes order);
  void image_output(Sizes sizes, DType dtype) { output(std::move(sizes), dtype, image_order()); }
  void rows_output(Sizes sizes, DType dtype) {
    const size_t rank = sizes.size();
    output(std::move(sizes), dtype, natural_order(rank));
  }
  // The line's value is a constant as it lies among the others.
  void constant_output(const char* name, Sizes sizes, DType dtype);

 private:
  friend class Planner;
  Planner& planner_;
};

// A line whose turn it is: all that it reads has its place.
class Emitter {
 public:
  Emitter(Planner& planner, int output) : value(output), planner_(planner) {}
  const int value;  // the line's
  const Line& line() const;
  Where where() const;
  int operand(size_t i) const { return line().operands[i]; }
  Values& values() const;
  const Value& of(int v) const { return values().at(v); }

  // The value, or a dense copy, as rows of its innermost dimension in this order; `apart`: also those with gaps between them.
  int rows(int v, const Sizes& order, bool apart);
  // The value, or a dense copy, with neighbours in its last dimension.
  int with_rows(int v);
  int64_t row(int v, const Sizes& order) const;  // elements from one row to the next
  // Of rows of channels, and of a dense image in PyTorch's order: also along dimensions of one element, where a view's mean
  // nothing.
  Strides4 image_strides(int v) const;
  Strides4 plane_strides(int v) const;
  // Whether y may be written over x, which nothing reads any more; then it is.
  void overwrite(int x);

  // Operands of the call, by role.
  Operand at(int v) const { return token(v < 0 ? 0 : v + 1); }
  Operand output() const { return at(value); }
  Operand constant(const char* name) const;  // absent where the line has none

  template <class P>
  void step(const Entry& entry, const P& p, const typename P::Operands& operands) {
    static_assert(kOperandsIn<typename P::Operands> <= kRolesAtMost);
    auto call = std::make_shared<Prepared<P>>(prepare(entry, where(), p));
    call->problem = call->own(p);  // a kept call may be of tensors that lie otherwise
    const int64_t workspace = call->workspace;
    add(
        std::move(call),
        [](const void* prepared, const Operand* m, Workspace& memory) {
          static_cast<const Prepared<P>*>(prepared)->execute(*reinterpret_cast<const typename P::Operands*>(m), memory);
        },
        reinterpret_cast<const Operand*>(&operands), kOperandsIn<typename P::Operands>, workspace, &entry);
  }
  // A pass over memory.
  template <class P, class Operands>
  void pass(const P& p, const Operands& operands, void (*run)(const void*, const Operand*, Workspace&)) {
    add(std::make_shared<const P>(p), run, reinterpret_cast<const Operand*>(&operands), kOperandsIn<Operands>, 0, nullptr);
  }
  void copy(int from, int to);
  // The line's value as what `position` says of another's memory: a view of it or, where it has a place already, a copy.
  void view(Position position);

 private:
  friend class Planner;
  static Operand token(int64_t number) { return Operand(reinterpret_cast<const void*>(number)); }
  void add(std::shared_ptr<const void> call, StepFunction run, const Operand* operands, size_t count, int64_t workspace,
           const Entry* entry);
  Planner& planner_;
};

struct Step {
  virtual ~Step() = default;
  virtual void emit(Emitter& e) = 0;
  bool writes_slices = false;  // its value may be a part of a concatenation, in rows with gaps between them
};
struct StepKind {
  const char* name;
  bool has_algorithms;
  std::unique_ptr<Step> (*read)(Reader&);
};
#define AI3_STEP_KIND_(name_, has_algorithms_, read_)                                      \
  constexpr ::ai3::ops::program::StepKind name_##_step = {#name_, has_algorithms_, read_}; \
  [[gnu::section("ai3_steps"), gnu::used]] static const ::ai3::ops::program::StepKind* const name_##_step_record = &name_##_step;
#define AI3_STEPS(operation_, Step_)                                                    \
  AI3_STEP_KIND_(operation_, true, [](::ai3::ops::program::Reader& reader) {            \
    return std::unique_ptr<::ai3::ops::program::Step>(std::make_unique<Step_>(reader)); \
  })
#define AI3_STEP(name_, ...)                                                                  \
  AI3_STEP_KIND_(name_, false, [](::ai3::ops::program::Reader& reader) {                      \
    return std::unique_ptr<::ai3::ops::program::Step>(std::make_unique<__VA_ARGS__>(reader)); \
  })

}  // namespace ai3::ops::program
