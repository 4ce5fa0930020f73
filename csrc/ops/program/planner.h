// The making of a plan, in the order of its functions: lines are read, values get places, steps are emitted.
#pragma once
#include "arena.h"
#include "step.h"

namespace ai3::ops::program {

// An emitted call whose places are values still.
struct Draft {
  struct Role {
    int value = -1;         // or
    int64_t constant = -1;  // its offset
  };
  Call call;
  std::array<Role, kRolesAtMost> roles;
  int input, output;  // values, for reports
};

class Planner {
 public:
  Planner(Plan& plan, Where where) : plan(plan), where(where) {}
  Plan& plan;
  const Where where;
  Values values;                             // those of the lines come first
  std::vector<std::unique_ptr<Step>> steps;  // of each line; null for inputs and concatenations
  std::vector<Draft> drafts;

  const Program& program() const { return plan.program; }
  const Line& line(int value) const { return plan.program.lines[static_cast<size_t>(value)]; }

  // reading.cpp
  void read(const std::vector<InputLayout>& layouts);
  // places.cpp
  void place_concatenations();
  void place_results();
  void find_last_lines();
  void place_in_arena();
  void finish();
  // emission.cpp
  void emit();

  void copy(int from, int to, const Line& line);
  int dense(int v, const Sizes& order, const Line& line);
  void add(Draft draft, const Line& line);
  bool is_line(int v) const { return v < static_cast<int>(program().lines.size()); }
  bool is_concat(int v) const { return is_line(v) && line(v).operation == "concat"; }
  int& last_line(int root);

 private:
  void read_line(int index, const std::vector<InputLayout>& layouts);
  void read_input(const Line& line, const InputLayout& layout, int index);
  void read_concat(const Line& line);
  void emit_concat(int y);
  bool lie_side_by_side(const std::vector<int>& parts);
  bool has_ancestor(int v, int ancestor) const;
  Place place_of(int v) const;

  std::map<int, int> last_lines_;  // that read what a value's memory holds, by value with memory of its own
  std::map<std::pair<int, Sizes>, int> dense_copies_;
};

}  // namespace ai3::ops::program
