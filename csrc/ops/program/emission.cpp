// From lines whose values have their places to calls of kernels.
#include <algorithm>
#include <cstring>

#include "../prepare/passes.h"
#include "planner.h"

namespace ai3::ops::program {
namespace {

// Dimensions that lie in one another on both sides are one, so that a copy has as few as it can; outermost first.
struct CopyDim {
  int64_t size, from, to;
};
std::vector<CopyDim> copy_dims(const Sizes& sizes, const Sizes& from, const Sizes& to) {
  std::vector<CopyDim> dims;
  for (size_t d = 0; d < sizes.size(); d++)
    if (sizes[d] != 1) dims.push_back({sizes[d], from[d], to[d]});
  std::stable_sort(dims.begin(), dims.end(), [](const CopyDim& a, const CopyDim& b) { return a.to > b.to; });
  std::vector<CopyDim> joined;
  for (const CopyDim& d : dims) {
    CopyDim* outer = joined.empty() ? nullptr : &joined.back();
    if (outer && outer->from == d.from * d.size && outer->to == d.to * d.size)
      *outer = {outer->size * d.size, d.from, d.to};
    else
      joined.push_back(d);
  }
  return joined;
}
// Threads share all dimensions but the last two: where those are few, a long one is cut.
void cut_for_threads(std::vector<CopyDim>& dims, int64_t threads) {
  constexpr int64_t kShort = 32, kWorthIt = 1 << 15;
  int64_t count = 1, lines = 1;
  for (size_t d = 0; d < dims.size(); d++) count *= dims[d].size, lines *= d + 2 < dims.size() ? dims[d].size : 1;
  if (threads == 1 || dims.empty() || dims.size() > 3 || count < kWorthIt || lines >= threads) return;
  const size_t first = dims.size() < 2 ? 0 : dims.size() - 2;
  auto longest = std::max_element(dims.begin() + static_cast<std::ptrdiff_t>(first), dims.end(),
                                  [](const CopyDim& a, const CopyDim& b) { return a.size < b.size; });
  for (int64_t pieces = 2; longest->size / pieces >= kShort; pieces++)
    if (longest->size % pieces == 0 && (lines * pieces) % threads == 0) {
      const int64_t size = longest->size / pieces;
      longest->size = size;
      dims.insert(dims.begin() + static_cast<std::ptrdiff_t>(first), {pieces, longest->from * size, longest->to * size});
      return;
    }
}
void run_copy(const void* call, const Operand* m, Workspace&) {
  passes().copy(*static_cast<const CopyProblem*>(call), *reinterpret_cast<const UnaryOperands*>(m));
}

}  // namespace

const Line& Emitter::line() const { return planner_.line(value); }
Where Emitter::where() const { return planner_.where; }
Values& Emitter::values() const { return planner_.values; }
Operand Emitter::constant(const char* name) const {
  const int index = line().constant(name);
  return index < 0 ? token(0) : token(-1 - planner_.plan.constants[static_cast<size_t>(index)].offset);
}
int Emitter::rows(int v, const Sizes& order, bool apart) {
  const auto found = rows_apart(of(v).sizes, values().position(v).strides, order);
  const int64_t row = of(v).sizes[static_cast<size_t>(order.back())];
  if (found && (apart || *found == row || count_of(of(v).sizes) <= row)) return v;
  return planner_.dense(v, order, line());
}
int Emitter::with_rows(int v) {
  const Sizes& sizes = of(v).sizes;
  return sizes.back() == 1 || values().position(v).strides.back() == 1 ? v
                                                                       : planner_.dense(v, natural_order(sizes.size()), line());
}
int64_t Emitter::row(int v, const Sizes& order) const {
  return rows_apart(of(v).sizes, values().position(v).strides, order).value();
}
Strides4 Emitter::image_strides(int v) const {
  const Sizes& n = of(v).sizes;
  const int64_t row = this->row(v, image_order());
  return {n[2] * n[3] * row, 1, n[3] * row, row};
}
Strides4 Emitter::plane_strides(int v) const {
  const Sizes s = dense_strides(of(v).sizes, natural_order(4));
  return {s[0], s[1], s[2], s[3]};
}
void Emitter::overwrite(int x) {
  const Position p = values().position(x);
  const Value &root = of(p.root), &from = of(x);
  Value& to = values().at(value);
  if (to.parent >= 0 || to.home != Home::arena || root.home != Home::arena || p.offset != 0 || p.root == value) return;
  if (from.sizes != to.sizes || count_of(root.sizes) != count_of(to.sizes) || planner_.last_line(p.root) != value) return;
  if (!values().is_dense(x, to.order)) return;
  to.parent = p.root, to.view = true;
  planner_.last_line(p.root) = planner_.last_line(value);
}
void Emitter::copy(int from, int to) { planner_.copy(from, to, line()); }
void Emitter::view(Position position) {
  const Value& y = of(value);
  if (y.parent >= 0 || y.home != Home::arena) {  // it has its place
    const int seen = values().add_view(position.root, y.sizes, std::move(position));
    return copy(seen, value);
  }
  Value& to = values().at(value);
  to.parent = position.root, to.view = true, to.offset = position.offset, to.strides = std::move(position.strides);
  int& last = planner_.last_line(position.root);
  last = std::max(last, planner_.last_line(value));
}
void Emitter::add(std::shared_ptr<const void> call, StepFunction run, const Operand* operands, size_t count, int64_t workspace,
                  const Entry* entry) {
  Draft d{};
  d.call = {std::move(call), run, entry, {}, count, workspace, {}, nullptr, {}, 0, {}, {}, false};
  for (size_t i = 0; i < count; i++) {
    const auto number = reinterpret_cast<int64_t>(operands[i].data);
    if (number > 0) d.roles[i].value = static_cast<int>(number - 1);
    if (number < 0) d.roles[i].constant = -1 - number;
  }
  d.input = d.roles[0].value, d.output = value;
  planner_.add(std::move(d), line());
}

void Planner::add(Draft draft, const Line& text) {
  const Value& y = values.at(draft.output);
  draft.call.line = &text, draft.call.sizes = y.sizes;
  const auto row = rows_apart(y.sizes, values.position(draft.output).strides, y.order);
  draft.call.output_row = row.value_or(0);
  drafts.push_back(std::move(draft));
}
void Planner::copy(int from, int to, const Line& text) {
  const DType dtype = values.at(to).dtype;
  if (count_of(values.at(to).sizes) == 0) return;
  const Position x = values.position(from), target = values.position(to);
  std::vector<CopyDim> dims = copy_dims(values.at(from).sizes, x.strides, target.strides);
  // What is contiguous in x stands beside what is in y: squares of both are turned in registers.
  const auto inner = std::find_if(dims.begin(), dims.end(), [](const CopyDim& d) { return d.from == 1; });
  if (inner != dims.end() && inner + 1 < dims.end() && inner + 2 != dims.end()) std::rotate(inner, inner + 1, dims.end() - 1);
  cut_for_threads(dims, threads());
  while (dims.size() < 4) dims.insert(dims.begin(), {1, 0, 0});
  // Of more than four dimensions the outer ones are counted out.
  const size_t outer = dims.size() - 4;
  int64_t copies = 1;
  for (size_t d = 0; d < outer; d++) copies *= dims[d].size;
  for (int64_t i = 0; i < copies; i++) {
    int64_t rest = i, x_shift = 0, y_shift = 0;
    for (size_t d = outer; d-- > 0; rest /= dims[d].size)
      x_shift += rest % dims[d].size * dims[d].from, y_shift += rest % dims[d].size * dims[d].to;
    const CopyDim &n = dims[outer], &h = dims[outer + 1], &w = dims[outer + 2], &c = dims[outer + 3];
    CopyProblem p{dtype, threads(), n.size, c.size, h.size, w.size, {n.from, c.from, h.from, w.from}, {n.to, c.to, h.to, w.to}};
    join_rows(p);
    Draft d{};
    d.call = {std::make_shared<const CopyProblem>(p), run_copy, nullptr, {}, 2, 0, {}, nullptr, {}, 0, {}, {}, true};
    d.input = from, d.output = to;
    if (outer) {
      const int64_t x_at = values.position(from).offset + x_shift, y_at = values.position(to).offset + y_shift;
      d.input = values.add_view(x.root, {1}, {x.root, x_at, {1}});
      d.output = values.add_view(target.root, {1}, {target.root, y_at, {1}});
    }
    d.roles[0].value = d.input, d.roles[1].value = d.output;
    if (outer) d.output = to;
    add(std::move(d), text);
  }
}
int Planner::dense(int v, const Sizes& order, const Line& text) {
  const auto key = std::make_pair(v, order);
  if (const auto found = dense_copies_.find(key); found != dense_copies_.end()) return found->second;
  const int to = values.add(values.at(v).sizes, values.at(v).dtype, order);
  copy(v, to, text);
  return dense_copies_[key] = to;
}
void Planner::emit_concat(int y) {
  const auto dim = static_cast<size_t>(line(y).has("dim") ? line(y).number_of("dim") : 1);
  int64_t start = 0;
  for (const int part : line(y).operands) {
    const Position whole = values.position(y), from = values.position(part);
    const int64_t at = whole.offset + start * whole.strides[dim];
    if (from.root != whole.root || from.offset != at) {
      const Sizes sizes = values.at(part).sizes;
      const int to = values.add_view(whole.root, sizes, {whole.root, at, whole.strides});
      values.at(to).order = values.at(y).order;
      copy(part, to, line(y));
    }
    start += values.at(part).sizes[dim];
  }
}
void Planner::emit() {
  for (int i = program().inputs; i < static_cast<int>(program().lines.size()); i++) try {
      if (is_concat(i)) {
        emit_concat(i);
      } else {
        Emitter emitter(*this, i);
        if (count_of(values.at(i).sizes) > 0) steps[static_cast<size_t>(i)]->emit(emitter);
      }
    } catch (const std::exception& e) {
      if (std::strstr(e.what(), "ai3::_program")) throw;
      line(i).fail(e.what());
    }
  for (size_t i = 0; i < program().results.size(); i++) {
    const Result& r = program().results[i];
    const Value v = values.at(r.value);
    if (v.parent < 0 && v.home == Home::output && v.index == static_cast<int>(i)) continue;
    const int result =
        values.add(v.sizes, v.dtype, plan.outputs[i].channels_last ? image_order() : natural_order(v.sizes.size()));
    values.at(result).home = Home::output, values.at(result).index = static_cast<int>(i);
    copy(r.value, result, line(r.value));
  }
}

}  // namespace ai3::ops::program
