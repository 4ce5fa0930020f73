#include "plan.h"

#include "../dispatch/hash.h"
#include "planner.h"

namespace ai3::ops::program {

uint64_t mix_seal(uint64_t seal, int64_t bytes, uint64_t tag) {
  return Hash(seal).add(static_cast<uint64_t>(bytes)).add(tag).value() + 1;
}

std::shared_ptr<const Plan> make_plan(const std::string& text, const std::vector<InputLayout>& inputs, Where where) {
  auto plan = std::make_shared<Plan>();
  plan->program = parse(text);
  Planner planner(*plan, where);
  planner.read(inputs);
  planner.place_concatenations();
  planner.place_results();
  planner.find_last_lines();
  planner.emit();
  planner.place_in_arena();
  planner.finish();
  return plan;
}

}  // namespace ai3::ops::program
