// From the lines of a program to their steps and the sizes of their values.
#include <cstring>

#include "planner.h"

extern "C" {
extern const ai3::ops::program::StepKind* const __start_ai3_steps[];
extern const ai3::ops::program::StepKind* const __stop_ai3_steps[];
}

namespace ai3::ops::program {
namespace {

// The kind of a line, and the algorithm where it names one.
const StepKind& kind_of(const Line& line, const Entry*& entry) {
  const StepKind* found = nullptr;
  for (auto k = __start_ai3_steps; k != __stop_ai3_steps; k++) {
    const std::string name = (*k)->name;
    const bool fits = (*k)->has_algorithms ? line.operation.compare(0, name.size() + 1, name + "_") == 0 : line.operation == name;
    if (fits && (!found || name.size() > std::strlen(found->name))) found = *k;
  }
  if (!found) line.fail("unknown operation '" + line.operation + "'");
  if (found->has_algorithms)
    entry = &entry_named(operation_known(found->name), line.operation.substr(std::strlen(found->name) + 1));
  return *found;
}

}  // namespace

// ---- What a step's constructor asks ----------------------------------------------------------------------------------------

Where Reader::where() const { return planner_.where; }
const Value& Reader::any_operand(size_t i) const { return planner_.values.at(line.operands[i]); }
const Value& Reader::operand(size_t i) const {
  const Value& x = any_operand(i);
  line.check(x.dtype != DType::boolean, "computes no booleans");
  return x;
}
const Value& Reader::named(const char* option) const { return planner_.values.at(line.value(option)); }
void Reader::needs_operands(size_t count) const {
  line.check(line.operands.size() == count,
             "needs " + std::to_string(count) + " values, got " + std::to_string(line.operands.size()));
}
const Value& Reader::image() const {
  needs_operands(1);
  const Value& x = operand(0);
  line.check(x.sizes.size() == 4, "needs an image (N, C, H, W), got " + to_string(x.sizes));
  return x;
}
Parameters Reader::parameters() const {
  Parameters all = entry->defaults;
  for (size_t i = 0; i < entry->parameters.size(); i++) {
    const Parameter& p = entry->parameters[i];
    if (!line.has(p.name)) continue;
    all.values[i] = p.kind == Parameter::Kind::real ? std::bit_cast<int64_t>(line.real(p.name)) : line.number_of(p.name);
  }
  return all;
}
void Reader::constant(const char* name, int64_t bytes, uint64_t tag) {
  const Constant wanted{bytes, tag};
  Constant& known = planner_.plan.constants[static_cast<size_t>(line.constant(name))];
  line.check(bytes < kOverflow && (known.bytes < 0 || known == wanted),
             "needs a constant of " + std::to_string(bytes) + " bytes as " + name + ", which a line before it reads as " +
                 std::to_string(known.bytes) + " bytes" + (known.bytes == bytes ? " in another form" : ""));
  known = wanted;
}
void Reader::elements(const char* name, DType dtype, int64_t count) {
  if (line.has(name)) constant(name, checked_mul(count, size_of(dtype)), 0);
}
Activation Reader::activation(DType dtype, int64_t channels) {
  const std::string word = line.word("activation", "none");
  const std::optional<Activation> found = activation_called(word);
  line.check(found.has_value(), "unknown activation '" + word + "'");
  line.check(has_slope(*found) == line.has("slope"),
             std::string(has_slope(*found) ? "needs a slope" : "takes no slope") + " for activation " + word);
  elements("slope", accumulator(dtype), channels);
  return *found;
}
void Reader::output(Sizes sizes, DType dtype, Sizes order) {
  const Value& y = planner_.values.at(planner_.values.add(std::move(sizes), dtype, std::move(order)));
  if (!line.has("residual")) return;
  const Value& r = named("residual");
  line.check(r.sizes == y.sizes && r.dtype == y.dtype,
             "needs a residual of the output's sizes " + to_string(y.sizes) + ", got " + to_string(r.sizes));
}
void Reader::constant_output(const char* name, Sizes sizes, DType dtype) {
  elements(name, dtype, count_of(sizes));
  rows_output(std::move(sizes), dtype);
  Value& y = planner_.values.all().back();
  y.home = Home::constant, y.index = line.constant(name);
}

// ---- The lines -------------------------------------------------------------------------------------------------------------

void Planner::read_input(const Line& line, const InputLayout& layout, int index) {
  const size_t rank = layout.sizes.size();
  line.check(line.words.size() == 2, "needs input <dtype> <number of dimensions>");
  line.check(line.words[0] == ai3::name_of(layout.dtype), std::string("got a tensor of ") + ai3::name_of(layout.dtype));
  line.check(line.words[1] == std::to_string(rank) && rank >= 2, "got a tensor of sizes " + to_string(layout.sizes));
  for (size_t d = 1; d < rank; d++)
    line.check(layout.sizes[d] > 0, "needs a tensor with no dimension of 0 but the first, got " + to_string(layout.sizes));
  Value& v = values.at(values.add(layout.sizes, layout.dtype, rank == 4 && layout.row ? image_order() : natural_order(rank)));
  v.home = Home::input, v.index = index;
  if (layout.row && layout.row != v.innermost())
    for (int64_t d = 0; d < static_cast<int64_t>(rank); d++)
      if (d != v.order.back()) v.strides[static_cast<size_t>(d)] = v.strides[static_cast<size_t>(d)] / v.innermost() * layout.row;
}

// Along `dim`, the channels where it is not said.
void Planner::read_concat(const Line& line) {
  line.check(!line.operands.empty(), "needs values");
  const Value& first = values.at(line.operands[0]);
  Sizes sizes = first.sizes;
  const DType dtype = first.dtype;
  const auto dim = static_cast<size_t>(line.has("dim") ? line.number_of("dim") : 1);
  line.check(dim < sizes.size(), "needs values that have the dimension, got " + to_string(sizes));
  const bool image = sizes.size() == 4 && !line.has("dim");
  int64_t along = 0;
  for (const int operand : line.operands) {
    const Value& v = values.at(operand);
    line.check(v.sizes.size() == sizes.size(), "needs values of one rank, got " + to_string(v.sizes));
    along = checked_add(along, v.sizes[dim]), sizes[dim] = v.sizes[dim];
    line.check(v.sizes == sizes && v.dtype == dtype, "needs values that differ in channels alone, got " +
                                                         to_string(values.at(line.operands[0]).sizes) + " and " +
                                                         to_string(v.sizes));
  }
  sizes[dim] = along;
  const size_t rank = sizes.size();
  values.add(std::move(sizes), dtype, image ? image_order() : natural_order(rank));
}

void Planner::read_line(int index, const std::vector<InputLayout>& layouts) {
  const Line& text = line(index);
  if (text.operation == "input") return read_input(text, layouts[static_cast<size_t>(index)], index);
  if (text.operation == "concat") return read_concat(text);
  const Entry* entry = nullptr;
  const StepKind& kind = kind_of(text, entry);
  Reader reader(*this, text, entry);
  steps[static_cast<size_t>(index)] = kind.read(reader);
}

void Planner::read(const std::vector<InputLayout>& layouts) {
  if (static_cast<int>(layouts.size()) != program().inputs)
    throw std::runtime_error("ai3::_program: needs " + std::to_string(program().inputs) + " inputs, got " +
                             std::to_string(layouts.size()));
  steps.resize(program().lines.size());
  plan.constants.resize(static_cast<size_t>(program().constants));
  for (int i = 0; i < static_cast<int>(program().lines.size()); i++) try {
      read_line(i, layouts);
    } catch (const std::exception& e) {
      if (std::strstr(e.what(), "ai3::_program")) throw;
      line(i).fail(e.what());
    }
  for (size_t i = 0; i < plan.constants.size(); i++) {
    Constant& c = plan.constants[i];
    if (c.bytes < 0) throw std::runtime_error("ai3::_program: no line reads constant " + std::to_string(i));
    c.offset = plan.constant_bytes;
    plan.constant_bytes = checked_add(plan.constant_bytes, round_up(c.bytes, 64));
    plan.seal = mix_seal(plan.seal, c.bytes, c.tag);
  }
  plan.constant_bytes = checked_add(plan.constant_bytes, kSealBytes);
}

}  // namespace ai3::ops::program
