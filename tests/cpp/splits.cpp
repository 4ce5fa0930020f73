#include "splits.h"

#include <sys/mman.h>

#include <queue>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "problems.h"
#include "support.h"

namespace {
std::vector<ai3::splits_test::Section> recorded;
}

namespace ai3::inline AI3_LEVEL {
void record_split(int threads, int64_t count, const void* sizes, double (*size)(const void* sizes, int64_t item)) {
  splits_test::Section section{threads, {}};
  for (int64_t i = 0; i < count; i++) section.items.push_back(size(sizes, i));
  recorded.push_back(std::move(section));
}
}  // namespace ai3::inline AI3_LEVEL

namespace ai3::splits_test {
namespace {

// The kernel that `name`, maybe a rule, runs for p; null: none.
template <class P>
const Algorithm<P>* chosen(const std::string& operation, const char* name, const P& p) {
  const AlgorithmInfo* info = algorithm(AI3_STRINGIZE(AI3_LEVEL), operation, name);
  if (!info) return nullptr;
  const auto& a = reinterpret_cast<const Algorithm<P>&>(*info);
  Reason reason;
  if (!(a.traits.dtypes & dtype_bit(p.dtype)) || (a.traits.supports && !a.traits.supports(p, reason))) return nullptr;
  if (!a.traits.choose) return &a;
  const Candidates<P> usable{&operation,
                             [](const void* of, const P& q, const char* other) {
                               return chosen(*static_cast<const std::string*>(of), other, q) != nullptr;
                             },
                             nullptr};
  const Choice choice = a.traits.choose(p, usable);
  return choice.algorithm ? chosen(operation, choice.algorithm, p) : nullptr;
}

template <class P>
Split run(const std::string& operation, const P& p) {
  const Algorithm<P>* a = chosen(operation, "default", p);
  if (!a) throw std::runtime_error("nothing computes " + operation);
  constexpr size_t kBytes = size_t{1} << 40;  // addresses alone: nothing is read or written
  static char* const memory = static_cast<char*>(mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (memory == MAP_FAILED) throw std::runtime_error("no addresses for tensors");
  Workspace workspace{memory, kBytes, 0, nullptr};
  take_sections();
  typename P::Operands m;
  m.input = m.output = memory;
  if constexpr (requires { m.weight; }) m.weight = m.bias = memory;
  a->run(p, m, workspace);
  return {a->info.name, take_sections()};
}

Conv2dProblem conv2d(const bench::Shape& s) {
  const auto kernel = s.pair("kernel"), stride = s.pair("stride"), pad = s.pair("pad"), dilation = s.pair("dilation");
  const problems::Conv c = {s["N"],    s["C"],    s["H"], s["W"], s["K"],      kernel[0],   kernel[1],
                            stride[0], stride[1], pad[0], pad[1], dilation[0], dilation[1], s["groups"]};
  return problems::conv2d(c, true, true);
}

Pool2dProblem pool2d(const bench::Shape& s) {
  Pool2dProblem p{};
  p.dtype = DType::f32, p.batch = s["N"], p.channels = s["C"], p.in_height = s["H"], p.in_width = s["W"];
  if (s.values.count("out")) {
    const auto out = s.pair("out");
    p.out_height = out[0], p.out_width = out[1];
  } else {
    const auto kernel = s.pair("kernel"), stride = s.pair("stride"), pad = s.pair("pad");
    auto output = [&](int64_t in, int i) {
      const int64_t room = in + 2 * pad[i] - kernel[i];
      const int64_t n = (room + (s["ceil"] ? stride[i] - 1 : 0)) / stride[i] + 1;
      return (n - 1) * stride[i] >= in + pad[i] ? n - 1 : n;
    };
    p.kernel_height = kernel[0], p.kernel_width = kernel[1], p.stride_h = stride[0], p.stride_w = stride[1];
    p.pad_h = pad[0], p.pad_w = pad[1], p.dilation_h = p.dilation_w = 1;
    p.out_height = output(p.in_height, 0), p.out_width = output(p.in_width, 1);
  }
  p.x_stride = problems::strides(true, p.channels, p.in_height, p.in_width);
  p.y_stride = problems::strides(true, p.channels, p.out_height, p.out_width);
  return p;
}

LinearProblem linear(const bench::Shape& s) {
  LinearProblem p{};
  p.dtype = DType::f32, p.rows = s["M"], p.in_features = s["K"], p.out_features = s["N"], p.has_bias = true;
  return with_dense_rows(p);
}

}  // namespace

std::vector<Section> take_sections() { return std::exchange(recorded, {}); }

double sum(const Section& section) {
  double all = 0;
  for (const double item : section.items) all += item;
  return all;
}
int team(const Section& section) { return team_of(section.threads, static_cast<int64_t>(section.items.size())); }

double longest(const Section& section, int team) {
  const int64_t count = static_cast<int64_t>(section.items.size());
  const int shares = std::min(team, kShares);
  std::vector<int64_t> next;
  for (int s = 0; s < shares; s++) next.push_back(share(count, shares, s).begin + 1);
  struct Thread {
    double time;
    int index, passed;  // passed: shares in which it found nothing more
    bool first;         // its own share's first item is still to come
    bool operator<(const Thread& other) const { return time != other.time ? time > other.time : index > other.index; }
  };
  std::priority_queue<Thread> threads;  // the earliest on top
  for (int t = 0; t < team; t++) threads.push({0, t, 0, t < shares});
  double last = 0;
  while (!threads.empty()) {
    Thread t = threads.top();
    threads.pop();
    int64_t item = -1;
    for (; item < 0 && t.passed < shares; t.passed += item < 0) {
      const int of = (t.index + t.passed) % shares;
      const Share part = share(count, shares, of);
      if (t.first)
        item = part.begin;
      else if (next[of] < part.end)
        item = next[of]++;
      t.first = false;
    }
    if (item < 0) continue;
    t.time += section.items[item];
    if (t.time > last) last = t.time;
    threads.push(t);
  }
  return last;
}

Split split_of(const bench::Shape& s, int threads) {
  auto with_threads = [&](auto p) {
    p.threads = threads;
    return run(s.operation, p);
  };
  if (s.operation == "conv2d") return with_threads(conv2d(s));
  if (s.operation == "linear") return with_threads(linear(s));
  if (s.operation == "relu" || s.operation == "flatten")
    return with_threads(contiguous_elements(DType::f32, threads, s["count"]));
  return with_threads(pool2d(s));
}

bench::Shape on_images(bench::Shape layer, int64_t n) {
  const bool images = layer.values.count("H") > 0;
  for (const char* name : {"N", "M", "count"})
    if (const auto found = layer.values.find(name); found != layer.values.end() && images == (name == std::string("N")))
      found->second[0] *= n;
  return layer;
}

}  // namespace ai3::splits_test
