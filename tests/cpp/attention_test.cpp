// Attention with all that its operators take, forward and backward, against a kernel in float64: masks, windows, what is added to
// scores, dropout, patterns, tensors that lie as models have them. csrc/cuda/attention, and every level's on the CPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "cublas_v2.h"
#include "run.h"

namespace {
using namespace ai3;

const Algorithm<AttentionProblem>& named(const std::string& level, const char* name) {
  const AlgorithmInfo* info = algorithm(level, "attention", name);
  if (!info) throw std::runtime_error("no kernel attention_" + std::string(name) + " of level " + level);
  return *reinterpret_cast<const Algorithm<AttentionProblem>*>(info);
}
const Algorithm<AttentionProblem>& on_cuda() { return named("cuda", "math"); }
struct CudaAttention : testing::Test {
  void SetUp() override {
    if (!algorithm("cuda", "attention", "math")) GTEST_SKIP() << "built without CUDA's kernels (AI3_ONLY_LEVELS)";
  }
};

enum class Mask { none, boolean, of_query, of_float };
enum class Pattern { none, longformer, tokens, bigbird, lists, mixed };
struct Shape {
  int64_t outer, batch, heads, kv_heads, queries, keys, size, value_size;
};
struct Case {
  const char* name;
  Shape shape;
  bool causal = false, lower_right = false;
  int64_t left = -1, right = -1;
  double softcap = 0, dropout = 0;
  bool sinks = false, slopes = false, lengths = false;
  int64_t width = 0;      // of rel_w
  int64_t projected = 0;  // rows that linformer makes of the keys, by projections that its heads share or not
  bool shared = false;
  Mask mask = Mask::none;
  bool heads_inside = false;  // (N, L, H, E) in memory
  Pattern pattern = Pattern::none;
  bool in_parameters() const { return pattern == Pattern::tokens || pattern == Pattern::mixed; }  // no mask says what is seen
};
// Of patterns: a window of 6 and two global tokens; blocks of 4 beside each other and at the ends; blocks of 8 as `lists` has
// them. `tokens` has global and padded ones by flags, and global ones' own projections; `mixed` has blocks in part, under a mask,
// and in full, some of them repeated.
constexpr int64_t kWindow = 6, kTokens = 2, kBlock = 4, kListed = 8, kLists = 2;
int64_t listed(int64_t row, int64_t i, int64_t blocks) { return (row * 3 + i * 2) % blocks; }
int64_t count_listed(int64_t row) { return row == 1 ? 0 : kLists; }
bool sees(const Case& c, int64_t i, int64_t j) {
  const int64_t last = (c.shape.keys - 1) / kBlock, of_i = i / kBlock, of_j = j / kBlock,
                blocks = ceil_div(c.shape.keys, kListed);
  switch (c.pattern) {
    case Pattern::longformer: return std::abs(i - j) <= kWindow / 2 || i < kTokens || j < kTokens;
    case Pattern::bigbird: return std::abs(of_i - of_j) <= 1 || of_i == 0 || of_i == last || of_j == 0 || of_j == last;
    case Pattern::lists:
      for (int64_t k = 0; k < count_listed(i / kListed); k++)
        if (listed(i / kListed, k, blocks) == j / kListed) return true;
      return false;
    default: return true;
  }
}
// What an element of the mask hides: one in three, all of the second query, and the fourth key from all.
bool hides(const Case& c, int64_t i) { return i % 3 == 0 || i / c.shape.keys % c.shape.queries == 1 || i % c.shape.keys == 3; }
const Case cases[] = {
    {.name = "plain", .shape = {1, 2, 2, 2, 3, 9, 8, 6}},
    {.name = "grouped", .shape = {1, 1, 6, 2, 3, 33, 16, 16}},
    {.name = "grouped heads inside", .shape = {1, 2, 4, 2, 3, 33, 16, 16}, .heads_inside = true},
    {.name = "five dimensions", .shape = {2, 2, 2, 1, 3, 5, 4, 4}, .causal = true},
    {.name = "causal, fewer keys", .shape = {1, 1, 2, 2, 7, 5, 8, 8}, .causal = true},
    {.name = "lower right", .shape = {1, 1, 2, 2, 5, 19, 8, 8}, .lower_right = true},
    {.name = "lower right, fewer keys", .shape = {1, 1, 2, 2, 7, 5, 8, 8}, .lower_right = true},
    {.name = "window", .shape = {1, 1, 1, 1, 9, 150, 8, 8}, .left = 3, .right = 131},
    {.name = "window behind alone", .shape = {1, 1, 2, 1, 9, 7, 8, 8}, .left = 0},
    {.name = "boolean mask", .shape = {1, 2, 2, 2, 4, 35, 8, 8}, .mask = Mask::boolean},
    {.name = "mask of the query's type", .shape = {1, 2, 2, 1, 4, 35, 8, 9}, .mask = Mask::of_query},
    {.name = "mask of float32", .shape = {2, 2, 2, 2, 3, 7, 8, 9}, .mask = Mask::of_float, .heads_inside = true},
    {.name = "softcap", .shape = {1, 1, 2, 2, 4, 13, 8, 8}, .softcap = 1.5},
    {.name = "sinks", .shape = {1, 2, 2, 1, 3, 13, 8, 8}, .causal = true, .sinks = true},
    {.name = "alibi", .shape = {1, 2, 2, 1, 3, 13, 8, 8}, .lower_right = true, .slopes = true},
    {.name = "lengths", .shape = {1, 3, 2, 2, 3, 13, 8, 8}, .lower_right = true, .lengths = true},
    {.name = "positions", .shape = {1, 2, 2, 2, 3, 12, 8, 8}, .width = 3},
    {.name = "dropout", .shape = {1, 2, 2, 1, 4, 31, 8, 8}, .dropout = 0.3, .mask = Mask::boolean},
    {.name = "all",
     .shape = {1, 2, 4, 2, 4, 12, 8, 5},
     .lower_right = true,
     .left = 8,
     .softcap = 2.0,
     .dropout = 0.2,
     .sinks = true,
     .slopes = true,
     .lengths = true,
     .width = 4,
     .mask = Mask::of_query,
     .heads_inside = true},
};

// What the CPU's kernels compute in: float64, but where those were not built.
constexpr DType kWide = AI3_KERNELS_OF_FLOAT32 ? DType::f32 : DType::f64;

// A tensor of (outer, batch, heads, rows, size), or of some of those dimensions, in a storage type and in kWide.
struct Tensor {
  std::vector<int64_t> sizes = {}, strides = {};
  DType dtype = DType::f32;
  std::unique_ptr<Guarded> memory = nullptr, wide_memory = nullptr;
  Operand operand(bool wide) const {
    if (!memory) return {};
    Operand o = (wide ? wide_memory : memory)->as<char>();
    o.sizes = sizes.data(), o.strides = strides.data(), o.rank = static_cast<int32_t>(sizes.size());
    o.dtype = wide ? kWide : dtype;
    return o;
  }
};
int64_t product(const std::vector<int64_t>& sizes) {
  int64_t n = 1;
  for (const int64_t size : sizes) n *= size;
  return n;
}
Tensor made(DType dtype, std::vector<int64_t> sizes, const std::function<double(int64_t)>& value, bool heads_inside = false) {
  Tensor t{.sizes = sizes, .strides = std::vector<int64_t>(sizes.size()), .dtype = dtype};
  std::vector<size_t> order(sizes.size());
  for (size_t d = 0; d < order.size(); d++) order[d] = d;
  if (heads_inside) std::swap(order[order.size() - 2], order[order.size() - 3]);
  int64_t next = 1;
  for (size_t d = order.size(); d-- > 0; next *= sizes[order[d]]) t.strides[order[d]] = next;
  const int64_t count = product(sizes);
  t.memory = std::make_unique<Guarded>(count * size_of(dtype), Flush::end);
  t.wide_memory = std::make_unique<Guarded>(count * size_of(kWide), Flush::end);
  for (int64_t i = 0; i < count; i++) {
    put(dtype, t.memory->as<char>(), i, value(i));
    put(kWide, t.wide_memory->as<char>(), i, get(dtype, t.memory->as<char>(), i));
  }
  return t;
}
AttentionStrides strides_of(const Tensor& t) {
  return {t.sizes[0] == 1 ? 0 : t.strides[0], t.sizes[1] == 1 ? 0 : t.strides[1], t.sizes[2] == 1 ? 0 : t.strides[2],
          t.sizes[3] == 1 ? 0 : t.strides[3]};
}

// One call's tensors and problem; `wide`: in kWide.
struct Call {
  Case of;
  DType dtype;
  AttentionProblem p{};
  Tensor query, key, value, gradient, mask, own[Parameters::kAtMost];
  std::vector<uint8_t> booleans;
  std::vector<int64_t> lengths, lengths_sizes, lengths_strides;
  Parameters of_pattern{};  // p has its mask instead
  std::vector<int64_t> counts, indices, full_counts, full_indices, indices_sizes, indices_strides;
  std::vector<uint8_t> global, padded;
  std::vector<int64_t> flags_sizes, flags_strides;
  int64_t seed = 12345;

  Call(const Case& c, DType type) : of(c), dtype(type) {
    size_t next = 0;
    auto drawn_value = [&, &all = drawn(Values::reals)](int64_t) { return all[next++ % all.size()]; };
    auto tensor = [&](int64_t heads, int64_t rows, int64_t size) {
      return made(dtype, {c.shape.outer, c.shape.batch, heads, rows, size}, drawn_value, c.heads_inside);
    };
    query = tensor(c.shape.heads, c.shape.queries, c.shape.size), key = tensor(c.shape.kv_heads, c.shape.keys, c.shape.size);
    value = tensor(c.shape.kv_heads, c.shape.keys, c.shape.value_size),
    gradient = tensor(c.shape.heads, c.shape.queries, c.shape.value_size);
    p.threads = 1, p.outer = c.shape.outer, p.batch = c.shape.batch, p.heads = c.shape.heads, p.kv_heads = c.shape.kv_heads,
    p.queries = c.shape.queries;
    p.keys = c.shape.keys, p.size = c.shape.size, p.value_size = c.shape.value_size, p.scale = 0.4, p.dropout = c.dropout,
    p.causal = c.causal;
    p.lower_right = c.lower_right, p.window_left = c.left, p.window_right = c.right, p.softcap = c.softcap;
    p.query_at = strides_of(query), p.key_at = strides_of(key), p.value_at = strides_of(value),
    p.output_at = strides_of(gradient);
    int64_t* const given = p.parameters.values;
    given[Dense::window_left] = c.left, given[Dense::window_right] = c.right, given[Dense::causal_lower_right] = c.lower_right;
    std::memcpy(given + Dense::softcap, &c.softcap, sizeof(c.softcap));
    auto set = [&](Dense::Place place, std::vector<int64_t> sizes, double scale) {
      own[place] = made(dtype, std::move(sizes), [&](int64_t i) { return scale * drawn_value(i); });
      given[place] = 1;
    };
    if (c.sinks) set(Dense::sinks, {c.shape.heads}, 1);
    if (c.slopes) set(Dense::alibi_slopes, {c.shape.heads}, 0.2);
    if (c.width) {
      set(Dense::rel_h, {c.shape.outer, c.shape.batch, c.shape.heads, c.shape.queries, c.shape.keys / c.width}, 1);
      set(Dense::rel_w, {c.shape.outer, c.shape.batch, c.shape.heads, c.shape.queries, c.width}, 1);
      p.rel_width = c.width;
    }
    if (c.projected) {
      std::vector<int64_t> sizes{c.shape.kv_heads, c.projected, c.shape.keys};
      if (c.shared) sizes.erase(sizes.begin());
      std::fill(std::begin(p.parameters.values), std::end(p.parameters.values), 0), p.projected = c.projected;
      for (const int place : {Linear::key_projection, Linear::value_projection})
        set(static_cast<Dense::Place>(place), sizes, 0.3);
    }
    if (c.lengths) {
      for (int64_t i = 0; i < c.shape.outer * c.shape.batch; i++)
        lengths.push_back(i == 1 ? c.shape.keys : i == 0 ? c.shape.keys - 4 : 0);
      lengths_sizes = {c.shape.outer, c.shape.batch}, lengths_strides = {c.shape.batch, 1}, given[Dense::key_lengths] = 1;
    }
    if (c.in_parameters()) set_pattern();
    if (c.mask == Mask::none && (c.pattern == Pattern::none || c.in_parameters())) return;
    // One for all heads.
    const std::vector<int64_t> sizes{c.shape.outer, c.shape.batch, 1, c.shape.queries, c.shape.keys};
    p.has_mask = true;
    if (c.pattern != Pattern::none && !c.in_parameters()) {
      mask = made(DType::f32, {of.shape.outer, of.shape.batch, 1, p.queries, p.keys}, [](int64_t) { return 0; });
      p.mask_dtype = DType::boolean;
      for (int64_t i = 0; i < product(sizes); i++)
        booleans.push_back(sees(c, i / c.shape.keys % c.shape.queries, i % c.shape.keys));
      set_pattern();
    } else if (c.mask == Mask::boolean) {
      for (int64_t i = 0; i < product(sizes); i++) booleans.push_back(!hides(c, i));
      mask = made(DType::f32, sizes, [](int64_t) { return 0; }), p.mask_dtype = DType::boolean;
    } else {
      p.mask_dtype = c.mask == Mask::of_query ? dtype : DType::f32;
      mask = made(p.mask_dtype, sizes, [&](int64_t i) { return hides(c, i) ? -INFINITY : drawn_value(i); });
    }
    p.mask_at = strides_of(mask), p.mask_column = 1;
  }
  void set_pattern() {
    int64_t* const given = of_pattern.values;
    if (of.pattern == Pattern::tokens) set_tokens();
    if (of.pattern == Pattern::longformer) given[0] = kWindow, given[1] = kTokens;
    if (of.pattern == Pattern::bigbird) given[0] = kBlock;
    if (of.pattern != Pattern::lists && of.pattern != Pattern::mixed) return;
    const int64_t rows = ceil_div(p.queries, kListed), blocks = ceil_div(p.keys, kListed);
    for (int64_t row = 0; row < rows; row++) {
      counts.push_back(count_listed(row));
      for (int64_t k = 0; k < kLists; k++) indices.push_back(listed(row, k, blocks));
      if (of.pattern != Pattern::mixed) continue;
      full_counts.push_back(row % 3);
      for (int64_t k = 0; k < kLists; k++) full_indices.push_back(row == 0 ? 0 : row == 2 ? blocks - 1 : listed(row, 0, blocks));
      given[2] = given[3] = 1;
    }
    if (of.pattern == Pattern::mixed) indices[1] = indices[0];
    indices_sizes = {rows, kLists}, indices_strides = {kLists, 1}, given[0] = given[1] = 1, given[4] = kListed;
  }
  void set_tokens() {
    flags_sizes = {of.shape.outer, of.shape.batch, p.keys}, flags_strides = {of.shape.batch * p.keys, p.keys, 1};
    for (int64_t i = 0; i < product(flags_sizes); i++)
      global.push_back(i % 17 == 3), padded.push_back(i % 7 == 3 || i % p.keys > 66);
    auto like = [&, next = size_t{7}](const Tensor& t) mutable {
      return made(
          dtype, t.sizes, [&](int64_t) { return drawn(Values::reals)[next++ % 900]; }, of.heads_inside);
    };
    own[3] = like(query), own[4] = like(key), own[5] = like(value);
    of_pattern.values[0] = kWindow;
    for (int place = 2; place < 7; place++) of_pattern.values[place] = 1;
  }
  bool by_pattern(bool wide) const { return of.pattern != Pattern::none && (!wide || of.in_parameters()); }
  AttentionProblem problem(bool wide) const {
    AttentionProblem q = p;
    q.dtype = wide ? kWide : dtype;
    if (wide && p.has_mask && p.mask_dtype != DType::boolean) q.mask_dtype = kWide;
    if (by_pattern(wide)) q.parameters = of_pattern, q.has_mask = of.mask != Mask::none;
    return q;
  }
  template <class Operands>
  void give(Operands& m, bool wide) const {
    m.query = query.operand(wide), m.key = key.operand(wide), m.value = value.operand(wide);
    m.mask = booleans.empty() ? mask.operand(wide) : Operand(booleans.data());
    m.dropout_seed = &seed;
    for (int i = 0; i < Parameters::kAtMost; i++) m.own[i] = own[i].operand(wide);
    if (by_pattern(wide) && of.mask == Mask::none) m.mask = {};
    auto give_lists = [&](int place, const std::vector<int64_t>& count, const std::vector<int64_t>& list) {
      Operand &c = m.own[place], &l = m.own[place + 1];
      c = count.data(), c.sizes = indices_sizes.data(), c.strides = indices_strides.data() + 1, c.rank = 1;
      l = list.data(), l.sizes = indices_sizes.data(), l.strides = indices_strides.data(), l.rank = 2;
    };
    if (by_pattern(wide) && !counts.empty()) give_lists(0, counts, indices);
    if (by_pattern(wide) && !full_counts.empty()) give_lists(2, full_counts, full_indices);
    for (const auto& [place, flags] : {std::pair{2, &global}, {6, &padded}}) {
      if (flags->empty()) continue;
      m.own[place] = flags->data(), m.own[place].sizes = flags_sizes.data(), m.own[place].strides = flags_strides.data();
      m.own[place].rank = 3;
    }
    if (!lengths.empty()) {
      m.own[Dense::key_lengths] = lengths.data();
      m.own[Dense::key_lengths].sizes = lengths_sizes.data(), m.own[Dense::key_lengths].strides = lengths_strides.data();
      m.own[Dense::key_lengths].rank = 2;
    }
  }
};

// What a call makes, as numbers: elements lie as they do in memory.
using Numbers = std::vector<double>;
Numbers numbers(DType dtype, const Guarded& memory, int64_t count) {
  Numbers all(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; i++) all[static_cast<size_t>(i)] = get(dtype, memory.as<char>(), i);
  return all;
}
struct Results {
  Numbers output, logsumexp;
  std::vector<std::pair<std::string, Numbers>> gradients;
};
Results results(const Algorithm<AttentionProblem>& a, const Call& call, bool wide, bool gradients = true) {
  const AttentionProblem p = call.problem(wide);
  std::snprintf(current_case, sizeof(current_case), "%s %s %s", a.info.level, call.of.name, name_of(p.dtype));
  Reason reason{};
  if (!a.traits.supports(p, reason)) throw std::runtime_error(reason.text);
  const DType accumulator = p.dtype == DType::f64 ? DType::f64 : DType::f32;
  const int64_t rows = p.outer * p.batch * p.heads * p.queries, outputs = rows * p.value_size;
  const Guarded y(outputs * size_of(p.dtype), Flush::end), sums(rows * size_of(accumulator), Flush::end);
  auto run = [&](int64_t bytes, const auto& body) {
    EXPECT_EQ(bytes % piece_of(a), 0);
    const Guarded scratch(bytes, Flush::end);
    Workspace workspace{scratch.as<char>(), bytes, 0, nullptr};
    body(workspace);
    EXPECT_LE(workspace.used, bytes);
  };
  AttentionOperands m;
  call.give(m, wide);
  m.output = y.as<char>(), m.logsumexp = sums.as<char>();
  run(a.traits.workspace ? a.traits.workspace(p) : 0, [&](Workspace& workspace) { a.run(p, m, workspace); });
  Results r{numbers(p.dtype, y, outputs), numbers(accumulator, sums, rows), {}};
  if (!gradients) return r;
  AttentionGradients g;
  call.give(g, wide);
  g.grad_output = call.gradient.operand(wide), g.output = y.as<char>(), g.logsumexp = sums.as<char>();
  std::vector<std::unique_ptr<Guarded>> memory;
  std::vector<std::pair<std::string, int64_t>> wanted;
  auto want = [&](Operand& to, const std::string& name, const Tensor& like) {
    if (!like.memory) return;
    wanted.emplace_back(name, product(like.sizes));
    to = memory.emplace_back(std::make_unique<Guarded>(wanted.back().second * size_of(p.dtype), Flush::end))->as<char>();
  };
  want(g.grad_query, "query", call.query), want(g.grad_key, "key", call.key), want(g.grad_value, "value", call.value);
  for (int place = 0; place < Parameters::kAtMost; place++)
    want(g.grad_own[place], "parameter " + std::to_string(place), call.own[place]);
  run(a.traits.backward_workspace(p, g), [&](Workspace& workspace) { a.traits.backward(p, g, workspace); });
  for (size_t i = 0; i < wanted.size(); i++)
    r.gradients.emplace_back(wanted[i].first, numbers(p.dtype, *memory[i], wanted[i].second));
  return r;
}

void expect_near(const Numbers& got, const Numbers& expected, double limit, const std::string& what) {
  double largest = 0;
  for (const double v : expected) largest = std::fmax(largest, std::isfinite(v) ? std::fabs(v) : 0);
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); i++) {
    if (std::isfinite(expected[i]))
      ASSERT_LE(std::fabs(got[i] - expected[i]), limit * largest) << what << " " << i << ": " << got[i] << ", " << expected[i];
    else
      ASSERT_TRUE(got[i] == expected[i] || (std::isnan(got[i]) && std::isnan(expected[i])))
          << what << " " << i << ": " << got[i] << ", " << expected[i];
  }
}

constexpr DType dtypes[] = {DType::f64, DType::f32, DType::bf16, DType::f16};

void compare(const Case& c, const std::string& level, const char* by, const char* on_cpu, bool all_types = true) {
  for (const DType dtype : dtypes) {
    if (!is_compiled(level, dtype) || (!all_types && dtype != DType::f32 && dtype != DType::bf16)) continue;
    SCOPED_TRACE(level + " " + c.name + " " + name_of(dtype));
    const Call call(c, dtype);
    const Results got = results(named(level, by), call, false),
                  expected = results(named(usable_levels().back(), on_cpu), call, true);
    const double rounding = dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-11 : 0;
    const double limit = dtype == DType::f64 && kWide == DType::f64 ? 1e-13 : 4e-6;
    expect_near(got.output, expected.output, limit + rounding, "output");
    expect_near(got.logsumexp, expected.logsumexp, limit, "logsumexp");
    ASSERT_EQ(got.gradients.size(), expected.gradients.size());
    for (size_t i = 0; i < got.gradients.size(); i++)  // of an output that was rounded
      expect_near(got.gradients[i].second, expected.gradients[i].second, 10 * limit + 8 * rounding, got.gradients[i].first);
  }
}
TEST_F(CudaAttention, MathIsTheCpusInEveryCase) {
  for (const Case& c : cases) compare(c, "cuda", "math", "flash");
}
const Case projections[] = {
    {.name = "one projection", .shape = {1, 2, 2, 2, 3, 9, 8, 6}, .projected = 3, .shared = true},
    {.name = "one for each head", .shape = {2, 2, 2, 2, 2, 33, 8, 8}, .projected = 7},
    {.name = "dropout", .shape = {1, 2, 2, 2, 5, 33, 8, 8}, .dropout = 0.3, .projected = 7},
    {.name = "heads inside", .shape = {1, 2, 4, 2, 2, 20, 8, 9}, .projected = 6, .heads_inside = true},
    {.name = "shared by heads inside", .shape = {1, 2, 4, 2, 2, 20, 8, 9}, .projected = 2, .shared = true, .heads_inside = true}};
TEST_F(CudaAttention, LinformerIsTheCpusInEveryCase) {
  for (const Case& c : projections) compare(c, "cuda", "linformer", "linformer");
}

// Those that this machine runs, and that were built.
std::vector<std::string> levels() {
  std::vector<std::string> all = usable_levels();
  std::erase_if(all, [](const std::string& level) { return !algorithm(level, "attention", "math"); });
  return all;
}
TEST(Attention, EveryLevelIsTheLowestOneInEveryCase) {
  for (const std::string& level : levels()) {
    for (const Case& c : cases) compare(c, level, "flash", "flash");
    for (const Case& c : projections) compare(c, level, "linformer", "linformer");
  }
}
TEST(Attention, PatternsAreFlashUnderTheirMasks) {
  for (const std::string& level : levels())
    for (const double dropout : {0.0, 0.3}) {
      compare({.name = "longformer", .shape = {2, 2, 2, 1, 75, 75, 8, 5}, .dropout = dropout, .pattern = Pattern::longformer},
              level, "longformer", "flash");
      compare({.name = "longformer, heads inside",
               .shape = {1, 1, 2, 2, 20, 20, 33, 8},
               .dropout = dropout,
               .heads_inside = true,
               .pattern = Pattern::longformer},
              level, "longformer", "flash");
      compare({.name = "bigbird", .shape = {1, 2, 2, 2, 70, 70, 8, 5}, .dropout = dropout, .pattern = Pattern::bigbird}, level,
              "bigbird", "flash");
      compare({.name = "lists", .shape = {1, 2, 4, 2, 30, 150, 8, 17}, .dropout = dropout, .pattern = Pattern::lists}, level,
              "block_sparse", "flash");
    }
}

TEST_F(CudaAttention, PatternsAreTheCpus) {
  auto is = [](const Case& c, const char* by, const char* on_cpu) { compare(c, "cuda", by, on_cpu, false); };
  is({.name = "longformer", .shape = {1, 1, 2, 1, 67, 67, 8, 5}, .dropout = 0.3, .pattern = Pattern::longformer}, "longformer",
     "flash");
  is({.name = "tokens", .shape = {2, 1, 2, 2, 12, 12, 33, 8}, .heads_inside = true, .pattern = Pattern::tokens}, "longformer",
     "longformer");
  is({.name = "more tokens", .shape = {1, 2, 2, 1, 68, 68, 8, 5}, .pattern = Pattern::tokens}, "longformer", "longformer");
  is({.name = "bigbird", .shape = {1, 1, 2, 2, 67, 67, 8, 5}, .dropout = 0.3, .pattern = Pattern::bigbird}, "bigbird", "flash");
  compare({.name = "lists", .shape = {1, 2, 4, 2, 11, 66, 8, 17}, .pattern = Pattern::lists}, "cuda", "block_sparse", "flash");
  for (const Mask mask : {Mask::none, Mask::boolean, Mask::of_float})
    is({.name = "mixed", .shape = {1, 1, 2, 1, 26, 66, 8, 5}, .mask = mask, .pattern = Pattern::mixed}, "block_sparse",
       "block_sparse");
}
// PyTorch's kernels, for which the processor's stand in here: what reaches them, and what is refused.
TEST_F(CudaAttention, FlashTakesWhatPyTorchsKernelsTake) {
  if (AI3_KERNELS_OF_FLOAT32) GTEST_SKIP() << "built for float32 alone";
  for (const Case& c : {Case{.name = "causal", .shape = {1, 2, 4, 2, 6, 6, 16, 16}, .causal = true, .heads_inside = true},
                        Case{.name = "lower right", .shape = {2, 1, 2, 2, 3, 9, 8, 8}, .lower_right = true, .left = 4}}) {
    const Call call(c, DType::bf16);
    const Results got = results(named("cuda", "flash"), call, false),
                  expected = results(named(usable_levels().back(), "flash"), call, false);
    EXPECT_EQ(got.output, expected.output);
    for (size_t i = 0; i < got.gradients.size(); i++) EXPECT_EQ(got.gradients[i].second, expected.gradients[i].second);
  }
  auto refused = [](Case c, DType dtype, const char* why) {
    Reason reason{};
    EXPECT_FALSE(named("cuda", "flash").traits.supports(Call(c, dtype).problem(false), reason)) << why;
    EXPECT_NE(std::string(reason.text).find(why), std::string::npos) << reason.text;
  };
  const Case plain{.name = "plain", .shape = {1, 1, 2, 2, 4, 6, 8, 8}};
  auto with = [&](auto change) {
    Case c = plain;
    change(c);
    return c;
  };
  refused(plain, DType::f32, "needs bfloat16 or float16 on CUDA, got float32");
  refused(with([](Case& c) { c.shape.size = c.shape.value_size = 12; }), DType::f16, "a multiple of 8 up to 256, got 12 and 12");
  refused(with([](Case& c) { c.shape.value_size = 16; }), DType::f16, "needs one size");
  refused(with([](Case& c) { c.causal = true; }), DType::f16, "needs as many queries as keys");
  refused(with([](Case& c) { c.left = 1; }), DType::f16, "needs as many queries as keys");
  refused(with([](Case& c) { c.mask = Mask::boolean; }), DType::f16, "takes no attn_mask");
  refused(with([](Case& c) { c.dropout = 0.5; }), DType::f16, "takes no dropout_p");
  refused(with([](Case& c) { c.softcap = 2; }), DType::f16, "takes no softcap");
  refused(with([](Case& c) { c.sinks = true; }), DType::f16, "takes no sinks");
  for (const double scale : {0.0, -0.5, static_cast<double>(INFINITY)}) {
    AttentionProblem p = Call(plain, DType::f16).problem(false);
    p.scale = scale;
    Reason reason{};
    EXPECT_FALSE(named("cuda", "flash").traits.supports(p, reason));
    EXPECT_NE(std::string(reason.text).find("needs scale above 0"), std::string::npos) << reason.text;
  }
}
TEST_F(CudaAttention, RowsThatAPatternHidesMayBeAnything) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Call call({.name = "tokens", .shape = {1, 1, 2, 1, 68, 68, 8, 5}, .pattern = Pattern::tokens}, dtype);
    const Results before = results(named("cuda", "longformer"), call, false);
    for (Tensor* t : {&call.query, &call.key, &call.value, &call.gradient, &call.own[3], &call.own[4], &call.own[5]})
      for (int64_t i = 0; i < product(t->sizes); i++) {
        const int64_t row = i / t->sizes[4] % 68, batch = i / t->sizes[4] / 68 / t->sizes[2];
        if (call.padded[static_cast<size_t>(batch * 68 + row)]) put(dtype, t->memory->as<char>(), i, i % 2 ? NAN : INFINITY);
      }
    const Results after = results(named("cuda", "longformer"), call, false);
    EXPECT_EQ(before.output, after.output);
    EXPECT_EQ(before.logsumexp, after.logsumexp);
    for (size_t i = 0; i < before.gradients.size(); i++)
      EXPECT_EQ(before.gradients[i].second, after.gradients[i].second) << before.gradients[i].first;
  }
}
TEST_F(CudaAttention, WhatNamesNoBlockIsLeftOut) {
  const Case c{.name = "lists", .shape = {1, 1, 2, 2, 26, 20, 8, 8}, .pattern = Pattern::lists};
  Call call(c, DType::f32), wrong(c, DType::f32), longer(c, DType::f32);
  for (size_t row = 0; row < wrong.counts.size(); row++) {
    if (wrong.counts[row] == kLists) {
      call.counts[row] = 1, wrong.indices[row * kLists + 1] = row % 2 ? -1 : int64_t{1} << 40;
      longer.counts[row] = 1000000, longer.indices[row * kLists + 1] = -1;
    }
  }
  const Results right = results(named("cuda", "block_sparse"), call, false);
  for (const Call* other : {&wrong, &longer}) {
    const Results left_out = results(named("cuda", "block_sparse"), *other, false);
    EXPECT_EQ(right.output, left_out.output);
    for (size_t i = 0; i < right.gradients.size(); i++) EXPECT_EQ(right.gradients[i].second, left_out.gradients[i].second);
  }
}

// Of what no query sees; and what some see comes out there alone.
TEST_F(CudaAttention, HiddenKeysAndValuesMayBeAnything) {
  for (const Case& c : cases)
    for (const DType dtype : {DType::f32, DType::bf16}) {
      if (c.mask == Mask::none && !c.lengths) continue;
      SCOPED_TRACE(std::string(c.name) + " " + name_of(dtype));
      Call call(c, dtype);
      const Results before = results(on_cuda(), call, false);
      const bool masked = c.mask != Mask::none;
      for (Tensor* t : {&call.key, &call.value}) {
        const bool of_keys = t == &call.key;
        for (int64_t o = 0; o < c.shape.outer; o++)
          for (int64_t b = 0; b < c.shape.batch; b++)
            for (int64_t h = 0; h < c.shape.kv_heads; h++)
              for (int64_t j = 0; j < c.shape.keys; j++) {
                bool seen = false;
                for (int64_t i = 0; i < c.shape.queries; i++) {
                  const int64_t at = ((o * c.shape.batch + b) * c.shape.queries + i) * c.shape.keys + j;
                  seen |= !(masked && hides(c, at)) && !(c.lengths && j >= call.lengths[o * c.shape.batch + b]);
                }
                if (seen) continue;
                for (int64_t e = 0; e < t->sizes[4]; e++)
                  put(dtype, t->memory->as<char>(),
                      o * t->strides[0] + b * t->strides[1] + h * t->strides[2] + j * t->strides[3] + e,
                      (e + of_keys) % 2 ? NAN : INFINITY);
              }
      }
      for (Tensor* t : {&call.query, &call.gradient}) {  // the second query sees nothing
        if (!masked || c.sinks) continue;
        for (int64_t o = 0; o < c.shape.outer; o++)
          for (int64_t b = 0; b < c.shape.batch; b++)
            for (int64_t h = 0; h < c.shape.heads; h++)
              put(dtype, t->memory->as<char>(), o * t->strides[0] + b * t->strides[1] + h * t->strides[2] + t->strides[3] + 1,
                  NAN);
      }
      const Results after = results(on_cuda(), call, false);
      EXPECT_EQ(before.output, after.output);
      EXPECT_EQ(before.logsumexp, after.logsumexp);
      for (size_t i = 0; i < before.gradients.size(); i++)
        EXPECT_EQ(before.gradients[i].second, after.gradients[i].second) << before.gradients[i].first;
    }
}
TEST_F(CudaAttention, WhatIsSeenComesOut) {
  for (const bool lower_right : {false, true})
    for (const DType dtype : dtypes) {
      const Case c{.name = "causal", .shape = {1, 1, 2, 1, 6, 6, 4, 4}, .causal = true, .lower_right = lower_right};
      Call call(c, dtype);
      put(dtype, call.value.memory->as<char>(), 4 * 4 + 1, NAN);       // key 4
      put(dtype, call.value.memory->as<char>(), 2 * 4 + 3, INFINITY);  // key 2
      put(dtype, call.key.memory->as<char>(), 5 * 4, NAN);             // key 5
      const Results r = results(on_cuda(), call, false);
      for (int64_t i = 0; i < 12; i++)
        for (int64_t e = 0; e < 4; e++) {
          const double v = r.output[static_cast<size_t>(i * 4 + e)];
          if (i % 6 == 5 || (i % 6 == 4 && e == 1))
            EXPECT_TRUE(std::isnan(v)) << i << " " << e;
          else if (i % 6 >= 2 && e == 3)
            EXPECT_EQ(v, INFINITY) << i << " " << e;
          else
            EXPECT_TRUE(std::isfinite(v)) << i << " " << e;
        }
      const Numbers& of_query = r.gradients[0].second;  // a gradient of values that are not finite is that from there on
      for (int64_t i = 0; i < 12; i++)
        for (int64_t e = 0; e < 4; e++)
          EXPECT_EQ(std::isfinite(of_query[static_cast<size_t>(i * 4 + e)]), i % 6 < 2) << i << " " << e;
    }
}

TEST_F(CudaAttention, NoResultDependsOnTheOrderOfThreads) {
  const Case tokens{.name = "tokens", .shape = {1, 1, 2, 1, 68, 68, 8, 5}, .pattern = Pattern::tokens};
  for (const Case& c : {cases[0], *std::prev(std::end(cases)), tokens}) {
    const Algorithm<AttentionProblem>& by = named("cuda", c.pattern == Pattern::tokens ? "longformer" : "math");
    const Call call(c, DType::f32);
    const Results first = results(by, call, false);
    for (const unsigned seed : {1u, 2u}) {
      fake::seed = seed;
      const Results other = results(by, call, false);
      fake::seed = 0;
      EXPECT_EQ(first.output, other.output) << c.name;
      EXPECT_EQ(first.logsumexp, other.logsumexp) << c.name;
      for (size_t i = 0; i < first.gradients.size(); i++)
        EXPECT_EQ(first.gradients[i].second, other.gradients[i].second) << c.name << " " << first.gradients[i].first;
    }
  }
}

// Scores of many keys do not fit at once (4096 bytes here): batches, or some queries of one, go through.
TEST_F(CudaAttention, ScoresStayBounded) {
  AttentionProblem p = Call({.name = "many", .shape = {1, 8, 2, 2, 64, 100, 4, 4}}, DType::f32).problem(false);
  const int64_t fixed = 1024;  // of cuBLAS
  EXPECT_EQ(on_cuda().traits.workspace(p), fixed + round_up(2 * 100 * 4 * 5, 256));
  p.queries = 1;
  EXPECT_EQ(on_cuda().traits.workspace(p), fixed + round_up(2 * 100 * 4 * 5, 256));
  p.keys = int64_t{1} << 20;
  EXPECT_EQ(on_cuda().traits.workspace(p), fixed + 2 * (int64_t{1} << 20) * 4) << "one row of scores of each head at least";
  p.keys = INT32_MAX, p.heads = p.kv_heads = int64_t{1} << 40;
  EXPECT_EQ(on_cuda().traits.workspace(p), kOverflow) << "a product that wraps";
}

TEST_F(CudaAttention, OneProductServesEveryBatchAndHeadThatOneStrideLeadsTo) {
  auto products = [](Case c) {
    const Call call(c, DType::f32);
    const int64_t before = fake::blas.products;
    results(on_cuda(), call, false, false);
    return fake::blas.products - before;
  };
  EXPECT_EQ(products({.name = "contiguous", .shape = {1, 3, 4, 4, 5, 8, 4, 4}}), 2);
  EXPECT_EQ(products({.name = "heads inside", .shape = {1, 3, 4, 4, 5, 8, 4, 4}, .heads_inside = true}), 2 * 3);
  EXPECT_EQ(products({.name = "grouped", .shape = {1, 3, 6, 2, 5, 8, 4, 4}}), 2 * 3)
      << "the three heads of a group, or the six of keys";
}

TEST_F(CudaAttention, WithoutKeysTheOutputIsZeros) {
  for (const bool sinks : {false, true}) {
    const Call call({.name = "none", .shape = {1, 2, 2, 2, 3, 0, 4, 4}, .sinks = sinks}, DType::f32);
    const Results r = results(on_cuda(), call, false, false);
    for (const double v : r.output) EXPECT_EQ(v, 0);
    for (size_t i = 0; i < r.logsumexp.size(); i++)
      EXPECT_EQ(r.logsumexp[i],
                sinks ? get(DType::f32, call.own[Dense::sinks].memory->as<char>(), static_cast<int64_t>(i / 3 % 2)) : -INFINITY);
  }
}

}  // namespace
