#include "level.h"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class In, class Out, class Body>
void vectors(const In* in, Out* out, int64_t count, const Body& body) {
  constexpr int width = Vec<float>::width;
  int64_t i = 0;
  for (; i + width <= count; i += width) store(out + i, body(load(in + i)));
  if (i < count) store_partial(out + i, body(load_partial(in + i, count - i)), count - i);
}
template <class In, class Out>
void convert(const In* in, Out* out, int64_t count) {
  vectors(in, out, count, [](Vec<float> v) { return v; });
}
void relu_all(const float* in, float* out, int64_t count) {
  vectors(in, out, count, [](Vec<float> v) { return relu(v); });
}
void parallel(int threads, int64_t count, int64_t grain, int* counts, int* thread_at_most) {
  auto visit = [&](int64_t i, int thread) {
    __atomic_fetch_add(&counts[i], 1, __ATOMIC_RELAXED);
    for (int most = __atomic_load_n(thread_at_most, __ATOMIC_RELAXED); thread > most;)
      __atomic_compare_exchange_n(thread_at_most, &most, thread, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  };
  if (grain == 0)
    parallel_for(threads, count, visit);
  else
    parallel_ranges(threads, count, grain, [&](int64_t begin, int64_t end, int thread) {
      for (int64_t i = begin; i < end; i++) visit(i, thread);
    });
}

constinit const LevelFunctions functions = {AI3_STRINGIZE(AI3_LEVEL),
                                            convert<bfloat16, float>,
                                            convert<float16, float>,
                                            convert<float, bfloat16>,
                                            convert<float, float16>,
                                            relu_all,
                                            parallel};
[[gnu::section("ai3_test_levels"), gnu::used]] const LevelFunctions* const record = &functions;

}  // namespace
}  // namespace ai3::inline AI3_LEVEL
