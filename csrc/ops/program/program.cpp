// ai3::_program: many layers in one call. The text is prepared once for inputs' sizes and memory formats; a call is then a loop
// over kernels, without a tensor, an allocation or a check between them.
#include <chrono>
#include <mutex>

#include "../dispatch/fork.h"
#include "../dispatch/hash.h"
#include "../prepare/slots.h"
#include "plan.h"

namespace ai3::ops::program {
namespace {

using Tensors = std::vector<Tensor>;

[[noreturn]] void refuse_call(const std::string& reason) { throw std::runtime_error("ai3::_program: " + reason); }

DType dtype_of_tensor(const Tensor& t, const std::string& what) {
  if (const auto dtype = known_dtype(t)) return *dtype;
  if (t.scalar_type() == ScalarType::Bool) return DType::boolean;  // a mask
  refuse_call("needs float64, float32, bfloat16, float16 or bool tensors, got another dtype as " + what);
}
ScalarType scalar_type(DType dtype) {
  switch (dtype) {
    case DType::f64: return ScalarType::Double;
    case DType::bf16: return ScalarType::BFloat16;
    case DType::f16: return ScalarType::Half;
    case DType::boolean: return ScalarType::Bool;
    default: return ScalarType::Float;
  }
}

// How t lies in memory; what no step could read is copied first.
InputLayout layout_of(Tensor& t, size_t index) {
  const std::string what = "input " + std::to_string(index);
  if (!t.defined() || !t.is_cpu())
    refuse_call("needs CPU tensors, got " + (t.defined() ? device_text(t) : "None") + " as " + what);
  InputLayout layout{dtype_of_tensor(t, what), sizes_of(t), 0};
  if (t.dim() == 0) refuse_call("needs tensors of at least one dimension, got a scalar as " + what);
  Strides4 slice;
  if (t.dim() != 4)
    t = as_contiguous(t), layout.row = std::max<int64_t>(layout.sizes.back(), 1);
  else if (is_dense(t, true))
    layout.row = t.size(1);
  else if (is_dense(t, false))
    layout.row = 0;
  else if (slice_strides(t, true, slice))
    layout.row = slice.w;
  else
    t = torch::stable::contiguous(t), layout.row = 0;
  return layout;
}

// ---- The cache of plans -----------------------------------------------------------------------------------------------------

struct CachedPlan {
  uint64_t hash;
  std::string text;
  std::vector<InputLayout> inputs;
  int32_t threads;
  uint64_t generation, used;
  std::shared_ptr<const Plan> plan;
};
constexpr size_t kPlansAtMost = 128;
std::mutex mutex;
std::vector<CachedPlan> cache;
[[maybe_unused]] const int at_fork = guard_at_fork([] { mutex.lock(); }, [] { mutex.unlock(); });
uint64_t clock_of_use = 0;

std::shared_ptr<const Plan> plan_for(const std::string& text, const std::vector<InputLayout>& inputs) {
  Hash of_all;
  of_all.add(static_cast<uint64_t>(std::hash<std::string>()(text)));  // which is quicker, and need not be the same elsewhere
  for (const InputLayout& layout : inputs) of_all.add(layout.sizes);
  const uint64_t hash = of_all.value();
  const int32_t team = threads();
  const uint64_t now = generation();
  auto fits = [&](const CachedPlan& k) {
    return k.hash == hash && k.threads == team && k.generation == now && k.inputs == inputs && k.text == text;
  };
  {
    const std::lock_guard lock(mutex);
    for (CachedPlan& k : cache)
      if (fits(k)) return k.used = ++clock_of_use, k.plan;
  }
  std::shared_ptr<const Plan> plan = make_plan(text, inputs, Where{});  // not under the lock: other programs run on
  const std::lock_guard lock(mutex);
  for (CachedPlan& k : cache)
    if (fits(k)) return k.plan;
  if (cache.size() == kPlansAtMost)
    cache.erase(
        std::min_element(cache.begin(), cache.end(), [](const CachedPlan& a, const CachedPlan& b) { return a.used < b.used; }));
  cache.push_back({hash, text, inputs, team, now, ++clock_of_use, plan});
  return plan;
}

// ---- Calls -------------------------------------------------------------------------------------------------------------------

// Where the constants lie.
const char* checked_constants(const Plan& plan, const Tensors& given) {
  if (given.size() != 1) refuse_call("needs one tensor of constants, got " + std::to_string(given.size()));
  const Tensor& constants = given[0];
  if (!constants.defined() || !constants.is_cpu() || constants.scalar_type() != ScalarType::Byte || constants.dim() != 1 ||
      !is_contiguous(constants) || constants.numel() != plan.constant_bytes)
    refuse_call("needs " + std::to_string(plan.constant_bytes) + " bytes of constants, as Builder.build makes them, got " +
                to_string(sizes_of(constants)));
  const auto* data = static_cast<const char*>(constants.const_data_ptr());
  if (std::memcmp(data + plan.constant_bytes - kSealBytes, &plan.seal, sizeof(plan.seal)) != 0)
    refuse_call("needs constants that were packed for this program and for this instruction set; build it again");
  return data;
}

struct Run {
  Tensors inputs, constants, outputs;
  std::shared_ptr<const Plan> plan;
  std::vector<char*> bases;

  explicit Run(Arguments& in) {
    inputs = in.take<Tensors>(), constants = in.take<Tensors>();
    const std::string text = in.take<std::string>();
    std::vector<InputLayout> layouts;
    for (size_t i = 0; i < inputs.size(); i++) layouts.push_back(layout_of(inputs[i], i));
    plan = plan_for(text, layouts);
    const char* data = checked_constants(*plan, constants);
    for (const OutputLayout& o : plan->outputs)
      outputs.push_back(empty(o.sizes, scalar_type(o.dtype), inputs[0], o.channels_last));
    bases.push_back(nullptr);
    auto add = [&](const void* data) { bases.push_back(static_cast<char*>(const_cast<void*>(data))); };
    for (const Tensor& t : inputs) add(t.const_data_ptr());
    add(data);
    for (const Tensor& t : outputs) add(t.mutable_data_ptr());
  }
  void* at(const Place& place) const { return place.base < 0 ? nullptr : bases[static_cast<size_t>(place.base)] + place.offset; }

  // after(i) is called when step i is done.
  template <class After>
  void run(const After& after) {
    const Scratch arena(plan->arena_bytes);
    bases[0] = arena.data();
    std::array<Operand, kRolesAtMost> operands;  // a step reads as many as it has
    for (size_t i = 0; i < plan->steps.size(); i++) {
      const Call& step = plan->steps[i];
      for (size_t role = 0; role < step.count; role++) operands[role].data = at(step.operands[role]);
      LentWorkspace workspace(static_cast<char*>(at(step.workspace)), step.workspace_bytes, inputs[0]);
      step.run(step.prepared.get(), operands.data(), workspace);
      if (step.entry)
        check(workspace.used <= workspace.bytes, *step.entry, "states ", workspace.bytes, " bytes of workspace and takes ",
              workspace.used);
      after(i);
    }
  }
};

void run_program(StableIValue* stack) {
  Arguments in(stack);
  Run call(in);
  call.run([](size_t) {});
  give(stack, 0, call.outputs);
}

// Microseconds of each step in each of `repeats` calls, as (repeats, steps).
void profile_program(StableIValue* stack) {
  Arguments in(stack);
  Run call(in);
  const int64_t repeats = in.take<int64_t>(), steps = static_cast<int64_t>(call.plan->steps.size());
  if (repeats < 0) refuse_call("needs repeats of at least 0, got " + std::to_string(repeats));
  Tensor times = empty({repeats, steps}, ScalarType::Double, call.inputs[0]);
  double* to = static_cast<double*>(times.mutable_data_ptr());
  for (int64_t r = 0; r < repeats; r++) {
    auto last = std::chrono::steady_clock::now();
    call.run([&](size_t) {
      const auto now = std::chrono::steady_clock::now();
      *to++ = std::chrono::duration<double, std::micro>(now - last).count(), last = now;
    });
  }
  give(stack, 0, times);
}

// One tensor for all constants of a program, the packed weights among them, of so many bytes. Each is put where the one before it
// ended, so that only one at a time is in memory twice; the seal, behind the last one, grows with each.
void program_constants(StableIValue* stack) {
  Arguments in(stack);
  in.take<Tensor>();  // of the device
  int64_t bytes = kSealBytes;
  for (const int64_t size : in.take<std::vector<int64_t>>()) {
    if (size < 0) refuse_call("needs sizes of constants in bytes, got " + std::to_string(size));
    bytes = checked_add(bytes, round_up(size, 64));
  }
  Tensor constants = empty_bytes(bytes);
  auto* data = static_cast<char*>(constants.mutable_data_ptr());
  ask_for_huge_pages(data, bytes);
  std::memset(data + bytes - kSealBytes, 0, static_cast<size_t>(kSealBytes));
  give(stack, 0, constants);
}

// Puts one constant at its place; returns that of the next one.
void put_constant(StableIValue* stack) {
  Arguments in(stack);
  const Tensor all = in.take<Tensor>(), constant = in.take<Tensor>();
  const int64_t place = in.take<int64_t>();
  const bool packed = in.take<bool>();
  for (const Tensor* t : {&all, &constant})
    if (!t->defined() || !t->is_cpu() || !is_contiguous(*t)) refuse_call("needs contiguous CPU tensors as constants");
  const int64_t size = bytes_of(constant), room = bytes_of(all) - kSealBytes, end = checked_add(place, round_up(size, 64));
  if (place < 0 || place % 64 != 0 || end > room)
    refuse_call("needs a place for " + std::to_string(size) + " bytes in " + std::to_string(room) + ", got " +
                std::to_string(place));
  auto* const data = static_cast<char*>(all.mutable_data_ptr());
  std::memcpy(data + place, constant.const_data_ptr(), static_cast<size_t>(size));
  std::memset(data + place + size, 0, static_cast<size_t>(end - place - size));
  uint64_t seal = 0;
  std::memcpy(&seal, data + room, sizeof(seal));
  seal = mix_seal(seal, size, packed ? tag_of_pack(constant) : 0);
  std::memcpy(data + room, &seal, sizeof(seal));
  give(stack, 0, end);
}

AI3_OPERATOR(_program, "(Tensor[] inputs, Tensor[] constants, str program) -> Tensor[]", run_program)
AI3_OPERATOR(_program_constants, "(Tensor like, int[] bytes) -> Tensor", program_constants)
AI3_OPERATOR(_program_put_constant_, "(Tensor(a!) constants, Tensor constant, int place, bool packed) -> int", put_constant)
AI3_OPERATOR(_program_profile, "(Tensor[] inputs, Tensor[] constants, str program, int repeats) -> Tensor", profile_program)

}  // namespace
}  // namespace ai3::ops::program

// How a program is carried out, as JSON; each input is its dtype (as in the registry), the elements from pixel to pixel (0:
// NCHW), the number of dimensions and the sizes. Null on failure. Valid until the next call from the same thread.
extern "C" AI3_EXPORT const char* ai3_program(const char* text, const int64_t* inputs, int count, char* error, int64_t size) {
  static thread_local std::string json;
  return ai3::ops::guarded(error, size, [&] {
    std::vector<ai3::ops::program::InputLayout> layouts;
    const int64_t *at = inputs, *const end = inputs + count;
    while (end - at >= 3 && end - at - 3 >= at[2] && at[2] >= 0) {
      if (at[0] < 0 || (at[0] > 3 && at[0] != static_cast<int64_t>(ai3::DType::boolean)))
        throw std::runtime_error("ai3: unknown dtype " + std::to_string(at[0]));
      layouts.push_back({static_cast<ai3::DType>(at[0]), {at + 3, at + 3 + at[2]}, at[1]});
      at += 3 + at[2];
    }
    json = ai3::ops::program::describe(*ai3::ops::program::plan_for(text, layouts));
    return json.c_str();
  });
}
