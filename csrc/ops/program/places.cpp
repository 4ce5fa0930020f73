// Where a program's values lie.
#include <algorithm>

#include "planner.h"

namespace ai3::ops::program {

bool Planner::has_ancestor(int v, int ancestor) const {
  for (; v >= 0; v = values.at(v).parent)
    if (v == ancestor) return true;
  return false;
}
// Whether values are neighbouring parts of one already.
bool Planner::lie_side_by_side(const std::vector<int>& parts) {
  const Value& first = values.at(parts[0]);
  if (first.parent < 0 && parts.size() > 1) return false;
  int64_t start = first.start;
  for (const int part : parts) {
    const Value& v = values.at(part);
    if (v.parent != first.parent || v.view || v.dim != first.dim || v.start != start) return false;
    start += v.sizes[static_cast<size_t>(v.dim)];
  }
  return true;
}

// Concatenations are no steps where their parts are written into them at once. The widest come first, so that one which is a
// part of a wider one, as all but a dense block's last are, lies in it. Along another dimension than the innermost, parts are
// only written in place where they are whole pieces of memory.
void Planner::place_concatenations() {
  auto dim_of = [&](int c) { return line(c).has("dim") ? line(c).number_of("dim") : 1; };
  std::vector<int> concats;
  for (int i = 0; i < static_cast<int>(program().lines.size()); i++)
    if (is_concat(i)) concats.push_back(i);
  auto width = [&](int c) { return values.at(c).sizes[static_cast<size_t>(dim_of(c))]; };
  std::stable_sort(concats.begin(), concats.end(),
                   [&](int a, int b) { return width(a) != width(b) ? width(a) > width(b) : a > b; });
  for (const int c : concats) {
    const std::vector<int>& parts = line(c).operands;
    const auto dim = static_cast<int>(dim_of(c));
    if (values.at(c).parent < 0 && lie_side_by_side(parts) && values.at(parts[0]).dim == dim) {
      const Value& first = values.at(parts[0]);
      Value& whole = values.at(c);
      if (parts.size() == 1)
        whole.parent = parts[0], whole.dim = dim, whole.start = 0;
      else
        whole.parent = first.parent, whole.dim = dim, whole.start = first.start;
      continue;
    }
    const Sizes &sizes = values.at(c).sizes, &order = values.at(c).order;
    const auto at = std::find(order.begin(), order.end(), dim);
    const bool innermost = *at == order.back();
    const bool pieces = std::all_of(order.begin(), at, [&](int64_t d) { return sizes[static_cast<size_t>(d)] == 1; });
    int64_t start = 0;
    for (const int part : parts) {
      Value& v = values.at(part);
      const bool writes =
          is_concat(part) || (steps[static_cast<size_t>(part)] && steps[static_cast<size_t>(part)]->writes_slices);
      // The same dimension is innermost in both, even one of size 1: steps write rows of it, apart from each other.
      const bool fits = (innermost || pieces) && v.order.back() == order.back() && same_order(v.sizes, v.order, order);
      if (v.parent < 0 && v.home == Home::arena && writes && fits && !has_ancestor(c, part))
        v.parent = c, v.dim = dim, v.start = start;
      start += v.sizes[static_cast<size_t>(dim)];
    }
  }
}

// Results that are memory of their own are written where the caller gets them.
void Planner::place_results() {
  for (size_t i = 0; i < program().results.size(); i++) {
    const Result& r = program().results[i];
    Value& v = values.at(r.value);
    const bool image = v.sizes.size() == 4 && r.channels_last;
    plan.outputs.push_back({v.sizes, v.dtype, image});
    const bool fits = same_order(v.sizes, v.order, image ? image_order() : natural_order(v.sizes.size()));
    if (v.parent < 0 && v.home == Home::arena && fits) v.home = Home::output, v.index = static_cast<int>(i);
  }
}

int& Planner::last_line(int root) { return last_lines_.try_emplace(root, -1).first->second; }
void Planner::find_last_lines() {
  auto read = [&](int v, int at) { last_line(values.position(v).root) = at; };
  for (int i = 0; i < static_cast<int>(program().lines.size()); i++) {
    for (const int v : line(i).operands) read(v, i);
    for (const auto& [name, text] : line(i).options)
      if (text[0] == '%') read(line(i).value(name), i);
  }
  for (const Result& r : program().results) read(r.value, kNever);
}

void Planner::place_in_arena() {
  std::vector<Block> blocks;
  for (size_t s = 0; s < drafts.size(); s++)
    for (const Draft::Role& role : drafts[s].roles) {
      if (role.value < 0) continue;
      Value& root = values.at(values.position(role.value).root);
      root.first = std::min(root.first, static_cast<int>(s)), root.last = std::max(root.last, static_cast<int>(s));
    }
  for (Value& v : values.all())
    if (v.parent < 0 && v.home == Home::arena && v.last >= 0)
      blocks.push_back({round_up(count_of(v.sizes) * size_of(v.dtype), 64), v.first, v.last, &v.place});
  for (size_t s = 0; s < drafts.size(); s++) {
    Call& call = drafts[s].call;
    if (call.workspace_bytes == 0) continue;
    call.workspace.base = 0;
    blocks.push_back({round_up(call.workspace_bytes, 64), static_cast<int>(s), static_cast<int>(s), &call.workspace.offset});
  }
  plan.live_bytes = most_at_once(blocks);
  plan.arena_bytes = place(blocks);
}

Place Planner::place_of(int v) const {
  if (v < 0) return {};
  const Position p = values.position(v);
  const Value& root = values.at(p.root);
  if (root.home == Home::constant)
    return {1 + program().inputs, plan.constants[static_cast<size_t>(root.index)].offset + p.offset * size_of(root.dtype)};
  const int32_t base = root.home == Home::arena   ? 0
                       : root.home == Home::input ? 1 + root.index
                                                  : 2 + program().inputs + root.index;
  return {base, root.place + p.offset * size_of(root.dtype)};
}
void Planner::finish() {
  for (Draft& d : drafts) {
    for (size_t i = 0; i < d.roles.size(); i++)
      d.call.operands[i] =
          d.roles[i].constant < 0 ? place_of(d.roles[i].value) : Place{1 + program().inputs, d.roles[i].constant};
    d.call.input = place_of(d.input), d.call.output = place_of(d.output);
    plan.steps.push_back(std::move(d.call));
  }
}

}  // namespace ai3::ops::program
