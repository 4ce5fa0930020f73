// ai3::attention_<algorithm>: schema, checks, and the way from tensors to kernels.
#include <cmath>

#include "../algos/attention/problem.h"
#include "prepare/run.h"
#include "program/step.h"

namespace ai3::ops {
namespace {

struct Call {
  Tensor query, key, value;
  std::optional<Tensor> mask;
  double dropout = 0;
  bool causal = false;
  std::optional<double> scale;
  bool grouped = false;
  std::optional<Tensor> dropout_seed = std::nullopt;
  std::optional<Parameters> parameters = std::nullopt;  // of the algorithm's own
  Arguments::Own own = {};                              // tensors among them
};
constexpr int64_t kRank = 5;

void set_threads(AttentionProblem& p) {
  p.threads = sizes_known(p) ? threads(checked_product({p.outer, p.batch, p.heads, p.queries, p.keys, p.size + p.value_size + 8}))
                             : threads();
}

AttentionProblem problem_from(const Query& q) {
  if (q.count != 11) throw std::runtime_error("ai3: an attention query needs 11 sizes");
  const int64_t* const s = q.sizes;
  check_numel({s[0], s[1], s[3], s[5]}), check_numel({s[0], s[2], s[4], s[5]}), check_numel({s[0], s[2], s[4], s[6]});
  AttentionProblem p{};
  p.dtype = q.dtype, p.outer = 1, p.batch = s[0], p.heads = s[1], p.kv_heads = s[2], p.queries = s[3], p.keys = s[4];
  p.size = s[5], p.value_size = s[6], p.has_mask = s[7] != 0, p.causal = s[8] != 0, p.dropout = s[9] != 0;
  p.projected = s[10], p.scale = 1;
  set_threads(p);
  return p;
}

// A size that both have, or that one of them has once; false where they differ.
bool broadcast(int64_t& size, int64_t other) {
  if (size == 1) size = other;
  return other == 1 || other == size;
}
// Size and stride of dimension d, counted from the last one; one of size 1 stands for all.
int64_t size_at(const Tensor& t, int64_t d) { return d < t.dim() ? t.size(t.dim() - 1 - d) : 1; }
int64_t stride_at(const Tensor& t, int64_t d) { return size_at(t, d) == 1 ? 0 : t.stride(t.dim() - 1 - d); }
AttentionStrides strides_of(const Tensor& t) { return {stride_at(t, 4), stride_at(t, 3), stride_at(t, 2), stride_at(t, 1)}; }

// t, or a copy whose rows are contiguous and, as cuBLAS needs them, apart.
Tensor with_rows(const Tensor& t) {
  const bool apart = !t.is_cuda() || size_at(t, 1) <= 1 || stride_at(t, 1) >= size_at(t, 0);
  return apart && (size_at(t, 0) <= 1 || t.stride(t.dim() - 1) == 1) ? t : as_contiguous(t);
}

// Those that an algorithm has, by their names.
void read_parameters(const Entry& entry, AttentionProblem& p) {
  for (int i = 0; i < static_cast<int>(entry.parameters.size()); i++) {
    const std::string& name = entry.parameters[static_cast<size_t>(i)].name;
    if (name == "window_left") p.window_left = p.parameters.whole(i);
    if (name == "window_right") p.window_right = p.parameters.whole(i);
    if (name == "causal_lower_right") p.lower_right = p.parameters.flag(i);
    if (name == "softcap") p.softcap = p.parameters.real(i);
  }
}

// ---- Tensors of algorithms' own
enum class Kind { values, flags, indices };
struct Expected {
  Kind kind;
  Sizes sizes;  // -1: any. Those before the last `fixed` ones may be 1 or missing
  size_t fixed;
  bool shared = false;  // its gradient has its own sizes, where it stands for several heads, too
};
int64_t whole_named(const Entry& entry, const AttentionProblem& p, const char* name, int64_t otherwise) {
  for (int i = 0; i < static_cast<int>(entry.parameters.size()); i++)
    if (entry.parameters[static_cast<size_t>(i)].name == name) return p.parameters.whole(i);
  return otherwise;
}
// By the names that the project's algorithms give them; a user's may be anything.
std::optional<Expected> expected(const Entry& entry, const AttentionProblem& p, const std::string& name) {
  const int64_t block = std::max<int64_t>(1, whole_named(entry, p, "block_size", 1)), rows = ceil_div(p.queries, block);
  const bool full = name.rfind("full_", 0) == 0;
  const std::string list = full ? name.substr(5) : name;
  if (name == "global_query") return Expected{Kind::values, {p.outer, p.batch, p.heads, p.queries, p.size}, 2};
  if (name == "global_key") return Expected{Kind::values, {p.outer, p.batch, p.kv_heads, p.keys, p.size}, 2};
  if (name == "global_value") return Expected{Kind::values, {p.outer, p.batch, p.kv_heads, p.keys, p.value_size}, 2};
  if (name == "global_mask" || name == "key_padding") return Expected{Kind::flags, {p.outer, p.batch, p.keys}, 1};
  if (list == "kv_num_blocks") return Expected{Kind::indices, {p.outer, p.batch, p.heads, rows}, 1};
  if (list == "kv_indices") return Expected{Kind::indices, {p.outer, p.batch, p.heads, rows, -1}, 2};
  if (name == "sinks" || name == "alibi_slopes") return Expected{Kind::values, {p.heads}, 1};
  if (name == "key_lengths") return Expected{Kind::indices, {p.outer, p.batch}, 0};
  if (name == "rel_h" || name == "rel_w") return Expected{Kind::values, {p.outer, p.batch, p.heads, p.queries, -1}, 2};
  if (name == "key_projection" || name == "value_projection") return Expected{Kind::values, {p.kv_heads, -1, p.keys}, 2, true};
  if (name == "random_indices")
    return Expected{Kind::indices, {p.heads, std::max<int64_t>(0, rows - 2), whole_named(entry, p, "random_blocks", -1)}, 2};
  return std::nullopt;
}
const Tensor* own_named(const Entry& entry, const Call& c, const std::string& name) {
  for (size_t i = 0; i < entry.parameters.size(); i++)
    if (entry.parameters[i].name == name && c.own[i]) return &*c.own[i];
  return nullptr;
}
// So that a kernel reads no memory that it must not: of each row of indices as many as are counted, or all.
void check_indices(const Entry& entry, const Tensor& indices, const Tensor* counts, int64_t blocks) {
  if (!indices.is_cpu()) return;
  const int64_t each = size_at(indices, 0), rows = each > 0 ? indices.numel() / each : counts ? counts->numel() : 0;
  const auto* const all = static_cast<const int64_t*>(indices.const_data_ptr());
  for (int64_t r = 0; r < rows; r++) {
    const int64_t count = counts ? static_cast<const int64_t*>(counts->const_data_ptr())[r] : each;
    check(count >= 0 && count <= each, entry, "needs counts of blocks from 0 to ", each, ", got ", count);
    for (int64_t i = 0; i < count; i++)
      check(all[r * each + i] >= 0 && all[r * each + i] < blocks, entry, "needs indices of blocks from 0 to ", blocks - 1,
            ", got ", all[r * each + i]);
  }
}
// Checks them, and makes them what kernels read: indices of 64 bits and contiguous, rows of values contiguous.
void prepare_own(const Entry& entry, Call& c, AttentionProblem& p) {
  if (whole_named(entry, p, "block_size", 1) < 1) return;  // which the algorithm refuses
  for (size_t i = 0; i < entry.parameters.size(); i++) {
    if (!c.own[i]) continue;
    Tensor& t = *c.own[i];
    const std::string& name = entry.parameters[i].name;
    check(t.defined() && t.device() == c.query.device(), entry, "needs query and ", name, " on one device");
    const auto wanted = expected(entry, p, name);
    if (!wanted) continue;
    const Sizes& sizes = wanted->sizes;
    bool fits = t.dim() <= static_cast<int64_t>(sizes.size()) && t.dim() >= static_cast<int64_t>(wanted->fixed);
    for (int64_t d = 0; fits && d < t.dim(); d++) {
      const int64_t want = sizes[sizes.size() - 1 - static_cast<size_t>(d)], got = size_at(t, d);
      fits = want < 0 || got == want || (got == 1 && d >= static_cast<int64_t>(wanted->fixed));
    }
    check(fits, entry, "needs ", name, " that broadcasts to ", sizes, ", got ", t);
    const ScalarType type = t.scalar_type();
    const char* const got = torch::headeronly::toString(type);
    if (wanted->kind == Kind::values) {
      check(type == c.query.scalar_type(), entry, "needs ", name, " of the query's dtype, got ", got);
      t = with_rows(t);
    } else if (wanted->kind == Kind::flags) {
      check(type == ScalarType::Bool, entry, "needs ", name, " of bool, got ", got);
    } else {
      check(type == ScalarType::Long || type == ScalarType::Int, entry, "needs ", name, " of int32 or int64, got ", got);
      if (type != ScalarType::Long) t = torch::stable::to(t, ScalarType::Long);
      if (!is_contiguous(t)) t = torch::stable::contiguous(t);
    }
  }
  const Tensor *const height = own_named(entry, c, "rel_h"), *const width = own_named(entry, c, "rel_w");
  if (height && width) {
    const int64_t h = size_at(*height, 0), w = size_at(*width, 0);
    check(h > 0 && w > 0 && p.keys % w == 0 && p.keys / w == h, entry, "needs rel_h and rel_w of a grid of ", p.keys,
          " keys, got ", h, " x ", w);
    p.rel_width = w;
  }
  if (const Tensor* lengths = own_named(entry, c, "key_lengths"); lengths && lengths->is_cpu())
    for (int64_t i = 0; i < lengths->numel(); i++) {
      const int64_t length = static_cast<const int64_t*>(lengths->const_data_ptr())[i];
      check(length >= 0 && length <= p.keys, entry, "needs key_lengths from 0 to ", p.keys, ", got ", length);
    }
  const Tensor *const of_key = own_named(entry, c, "key_projection"), *const of_value = own_named(entry, c, "value_projection");
  if (of_key && of_value) {
    p.projected = size_at(*of_key, 1);
    check(size_at(*of_value, 1) == p.projected, entry, "needs projections to one length, got ", *of_key, " and ", *of_value);
    check_numel({p.outer, p.batch, p.kv_heads, p.projected, std::max(p.size, p.value_size)});
  }
  const int64_t block = whole_named(entry, p, "block_size", 0);
  if (block < 1) return;
  for (const std::string list : {"kv_", "full_kv_"}) {
    const Tensor *const counts = own_named(entry, c, list + "num_blocks"), *const indices = own_named(entry, c, list + "indices");
    if (!counts || !indices) continue;
    Sizes rows = sizes_of(*indices);
    rows.pop_back();
    check(rows == sizes_of(*counts), entry, "needs ", list, "indices with one more dimension than ", list, "num_blocks, got ",
          *indices, " and ", *counts);
    check_indices(entry, *indices, counts, ceil_div(p.keys, block));
  }
  if (const Tensor* random = own_named(entry, c, "random_indices"))
    check_indices(entry, *random, nullptr, ceil_div(p.keys, block));
}
Operand operand_of(const Tensor& t) {
  Operand o = t.const_data_ptr();
  o.sizes = t.sizes().data(), o.strides = t.strides().data(), o.rank = static_cast<int32_t>(t.dim());
  const ScalarType type = t.scalar_type();
  o.dtype = type == ScalarType::Bool   ? DType::boolean
            : type == ScalarType::Long ? DType::i64
                                       : known_dtype(t).value_or(DType::i32);
  return o;
}
template <class Operands>
void set_own(Operands& m, const Call& c) {
  for (size_t i = 0; i < c.own.size(); i++)
    if (c.own[i]) m.own[i] = operand_of(*c.own[i]);
}

// Checks the arguments as torch.nn.functional.scaled_dot_product_attention does. Strides are set by `lay`.
AttentionProblem problem(const Entry& entry, const Call& c) {
  AttentionProblem p{};
  p.dtype = dtype_of(entry, c.query);
  check_same(entry, c.query, c.key, "key"), check_same(entry, c.query, c.value, "value");
  const std::pair<const Tensor*, const char*> all[] = {{&c.query, "query"}, {&c.key, "key"}, {&c.value, "value"}};
  for (const auto& [t, name] : all)
    check(t->dim() >= 2 && t->dim() <= kRank, entry, "needs query, key and value of 2 to 5 dimensions, got ", name, " of sizes ",
          *t);
  p.queries = size_at(c.query, 1), p.keys = size_at(c.key, 1), p.size = size_at(c.query, 0), p.value_size = size_at(c.value, 0);
  check(size_at(c.key, 0) == p.size, entry, "needs query and key of one size, got ", p.size, " and ", size_at(c.key, 0));
  check(size_at(c.value, 1) == p.keys, entry, "needs key and value of one length, got ", p.keys, " and ", size_at(c.value, 1));
  p.heads = size_at(c.query, 2), p.kv_heads = size_at(c.key, 2);
  if (c.grouped) {
    check(c.query.dim() > 2 && c.key.dim() > 2 && c.value.dim() > 2, entry, "needs dimensions of heads with enable_gqa");
    check(size_at(c.value, 2) == p.kv_heads, entry, "needs key and value of as many heads, got ", p.kv_heads, " and ",
          size_at(c.value, 2));
    check(p.kv_heads > 0 ? p.heads % p.kv_heads == 0 : p.heads == 0, entry,
          "needs heads of the query that are a multiple of the key's, got ", p.heads, " and ", p.kv_heads);
  } else {
    const bool fits = broadcast(p.heads, p.kv_heads) && broadcast(p.heads, size_at(c.value, 2));
    check(fits, entry, "needs query, key and value of as many heads, or enable_gqa, got ", size_at(c.query, 2), ", ", p.kv_heads,
          " and ", size_at(c.value, 2));
    p.kv_heads = p.heads;
  }
  for (int64_t d = 3; d < kRank; d++) {
    int64_t size = size_at(c.query, d);
    const bool fits = broadcast(size, size_at(c.key, d)) && broadcast(size, size_at(c.value, d));
    check(fits, entry, "needs query, key and value of one batch, got sizes ", c.query, ", ", c.key, " and ", c.value);
    (d == 3 ? p.batch : p.outer) = size;
  }
  if (c.mask) {
    const Tensor& t = *c.mask;
    const int64_t sizes[kRank] = {p.keys, p.queries, p.heads, p.batch, p.outer};
    const int64_t rank = std::max({c.query.dim(), c.key.dim(), c.value.dim()});
    bool fits = t.dim() <= rank;
    for (int64_t d = 0; d < rank; d++) fits = fits && (size_at(t, d) == 1 || size_at(t, d) == sizes[d]);
    check(fits, entry, "needs attn_mask that broadcasts to ", Sizes{p.batch, p.heads, p.queries, p.keys}, ", got ", t);
    const ScalarType type = t.scalar_type();
    check(type == ScalarType::Bool || type == ScalarType::Float || type == c.query.scalar_type(), entry,
          "needs attn_mask of bool, float32 or the query's dtype, got ", torch::headeronly::toString(type));
    check(t.device() == c.query.device(), entry, "needs query and attn_mask on one device, got ", device_text(c.query), " and ",
          device_text(t));
    check(!c.causal, entry, "needs attn_mask or is_causal, got both");
    p.has_mask = true, p.mask_dtype = type == ScalarType::Bool ? DType::boolean : *known_dtype(t);
  }
  check(c.dropout >= 0 && c.dropout <= 1, entry, "needs dropout_p from 0 to 1, got ", c.dropout);
  p.dropout = c.dropout, p.causal = c.causal;
  p.scale = c.scale.value_or(p.size > 0 ? 1 / std::sqrt(static_cast<double>(p.size)) : 1);
  p.parameters = c.parameters.value_or(entry.defaults);
  read_parameters(entry, p);
  checked_numel(entry, {p.outer, p.batch, p.heads, p.queries, std::max(p.size, p.value_size)}, 8);
  set_threads(p);
  return p;
}

// How the call's tensors lie, which have rows of contiguous elements; a mask's need not be.
void lay(AttentionProblem& p, const Call& c, const Tensor& output) {
  p.query_at = strides_of(c.query), p.key_at = strides_of(c.key), p.value_at = strides_of(c.value);
  p.output_at = strides_of(output);
  if (c.mask) p.mask_at = strides_of(*c.mask), p.mask_column = stride_at(*c.mask, 0);
}

// Of the output: (N, L, H, E) in memory where the query is, as models have it before they split heads and after they join them.
bool heads_inside(const Tensor& query) {
  return query.dim() == 4 && query.size(1) > 1 && query.size(2) > 1 && query.stride(1) < query.stride(2);
}
Tensor empty_output(const AttentionProblem& p, const Call& c) {
  const int64_t rank = std::max({c.query.dim(), c.key.dim(), c.value.dim()});
  const Sizes whole{p.outer, p.batch, p.heads, p.queries, p.value_size};
  if (rank == 4 && heads_inside(c.query))
    return torch::stable::transpose(empty({p.batch, p.queries, p.heads, p.value_size}, c.query.scalar_type(), c.query), 1, 2);
  return empty(Sizes(whole.end() - rank, whole.end()), c.query.scalar_type(), c.query);
}
// Of each query; float32 or, of float64, that.
Tensor empty_logsumexp(const Tensor& output, const Call& c) {
  Sizes sizes = sizes_of(output);
  sizes.pop_back();
  return empty(sizes, c.query.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float, c.query);
}

// A number that forward and backward pass have in common, of `dropout_p` above 0.
void check_seed(const Entry& entry, const Call& c) {
  if (!c.dropout) return;
  check(c.dropout_seed.has_value(), entry, "needs dropout_seed where dropout_p is not 0");
  const Tensor& seed = *c.dropout_seed;
  check(seed.scalar_type() == ScalarType::Long && seed.numel() == 1 && seed.device() == c.query.device(), entry,
        "needs one number of int64 on the query's device as dropout_seed, got ", seed);
}
// From PyTorch's generator.
Tensor drawn_seed(const Tensor& query) {
  const Tensor seed = empty({1}, ScalarType::Long, query);
  call_aten("aten::random_", "from", seed, int64_t{0}, std::optional<int64_t>(int64_t{1} << 62), std::optional<int64_t>());
  return seed;
}

template <bool takes_seed>
Call take_call(const Entry& entry, Arguments& in) {
  Call c;
  c.query = in.take<Tensor>(), c.key = in.take<Tensor>(), c.value = in.take<Tensor>(), c.mask = in.take<std::optional<Tensor>>();
  c.dropout = in.take<double>(), c.causal = in.take<bool>();
  c.scale = in.take<std::optional<double>>(), c.grouped = in.take<bool>();
  if (takes_seed) c.dropout_seed = in.take<std::optional<Tensor>>();
  c.parameters = in.take_parameters(entry, &c.own);
  return c;
}

template <bool records>
void forward(const Entry& entry, StableIValue* stack) {
  Arguments in(stack);
  Call c = take_call<records>(entry, in);
  AttentionProblem p = problem(entry, c);
  prepare_own(entry, c, p);
  Tensor output = empty_output(p, c);
  std::optional<Tensor> logsumexp;
  if (records) logsumexp = empty_logsumexp(output, c);
  const bool runs = output.numel() > 0 || (records && logsumexp->numel() > 0);
  const Prepared<AttentionProblem> call = prepare(entry, where_of(entry, c.query), p, runs);
  if (c.dropout > 0 && !records) c.dropout_seed = drawn_seed(c.query);
  check_seed(entry, c);
  if (runs) {
    c.query = with_rows(c.query), c.key = with_rows(c.key), c.value = with_rows(c.value);
    lay(p, c, output);
    AttentionOperands operands{.query = c.query.const_data_ptr(),
                               .key = c.key.const_data_ptr(),
                               .value = c.value.const_data_ptr(),
                               .mask = c.mask ? c.mask->const_data_ptr() : nullptr,
                               .output = output.mutable_data_ptr(),
                               .logsumexp = records ? logsumexp->mutable_data_ptr() : nullptr,
                               .dropout_seed = c.dropout_seed ? c.dropout_seed->const_data_ptr() : nullptr};
    set_own(operands, c);
    run_kernel(call, p, operands, c.query);
  }
  give(stack, 0, output);
  if (records) give(stack, 1, *logsumexp);
}

// `gradients` counts those of query, key, value and, in the schema's order, of the tensors of an algorithm's own, which have none
// where they are no values.
template <size_t gradients>
void backward(const Entry& entry, StableIValue* stack) {
  Arguments in(stack);
  Tensor grad = in.take<Tensor>();
  Call c;
  c.query = in.take<Tensor>(), c.key = in.take<Tensor>(), c.value = in.take<Tensor>(), c.mask = in.take<std::optional<Tensor>>();
  Tensor output = in.take<Tensor>();
  const Tensor logsumexp = in.take<Tensor>();
  c.dropout = in.take<double>(), c.causal = in.take<bool>();
  const auto wanted = in.take<std::vector<bool>>();
  c.scale = in.take<std::optional<double>>(), c.grouped = in.take<bool>();
  c.dropout_seed = in.take<std::optional<Tensor>>();
  c.parameters = in.take_parameters(entry, &c.own);
  check(wanted.size() == gradients, entry, "needs ", gradients, " flags in output_mask, got ", wanted.size());
  AttentionProblem p = problem(entry, c);
  prepare_own(entry, c, p);
  check_seed(entry, c);
  check_same(entry, c.query, grad, "grad_output"), check_same(entry, c.query, output, "output");
  const Tensor like = empty_output(p, c), sums = empty_logsumexp(like, c);  // of their sizes
  check(sizes_of(grad) == sizes_of(like) && sizes_of(output) == sizes_of(like), entry, "needs output and grad_output of sizes ",
        like, ", got ", output, " and ", grad);
  check(sizes_of(logsumexp) == sizes_of(sums) && logsumexp.scalar_type() == sums.scalar_type(), entry,
        "needs logsumexp of sizes ", sums, ", got ", logsumexp);
  auto fits = [&](const Tensor& t, int64_t heads) {
    Sizes want = sizes_of(like), got = sizes_of(t);
    want.pop_back(), want.pop_back(), got.pop_back(), got.pop_back();
    if (!want.empty()) want.back() = heads;
    return want == got;
  };
  check(fits(c.query, p.heads) && fits(c.key, p.kv_heads) && fits(c.value, p.kv_heads), entry,
        "needs query, key and value of the output's batch for gradients, got sizes ", c.query, ", ", c.key, " and ", c.value);
  Chosen<AttentionProblem> chosen(entry, device_of(entry, c.query), p);
  if (!chosen.algorithm->traits.backward)
    chosen = Chosen<AttentionProblem>(entry_named(*entry.operation, chosen.algorithm->traits.gradients(p).input),
                                      device_of(entry, c.query), p);
  auto gradient = [&](size_t i, const Tensor& of) { return empty(wanted[i] ? sizes_of(of) : Sizes{0}, of.scalar_type(), of); };
  std::vector<Tensor> result{gradient(0, c.query), gradient(1, c.key), gradient(2, c.value)};
  std::array<Tensor*, Parameters::kAtMost> of_own{};
  result.reserve(gradients);
  for (size_t i = 0; i < entry.parameters.size() && result.size() < gradients; i++) {
    if (!is_tensor(entry.parameters[i])) continue;
    const Tensor* const t = c.own[i] && known_dtype(*c.own[i]) && wanted[result.size()] ? &*c.own[i] : nullptr;
    if (auto size = expected(entry, p, entry.parameters[i].name); t && size && !size->shared) {
      for (int64_t& n : size->sizes) n = n < 0 ? size_at(*t, 0) : n;
      check(t->numel() == checked_numel(entry, size->sizes, 1), entry, "needs ", entry.parameters[i].name,
            " of the output's batch for its gradient, got ", *t);
    }
    result.push_back(empty(t ? sizes_of(*t) : Sizes{0}, c.query.scalar_type(), c.query));
    if (t) of_own[i] = &result.back();
  }
  while (result.size() < gradients) result.push_back(empty({0}, c.query.scalar_type(), c.query));
  if (like.numel() > 0 && p.keys > 0) {
    c.query = with_rows(c.query), c.key = with_rows(c.key), c.value = with_rows(c.value);
    if (!same_strides(grad, output) || (size_at(grad, 0) > 1 && stride_at(grad, 0) != 1))
      grad = as_contiguous(grad), output = as_contiguous(output);
    const Tensor per_query = as_contiguous(logsumexp);
    lay(p, c, output);
    auto written = [&](size_t i) { return wanted[i] ? result[i].mutable_data_ptr() : nullptr; };
    AttentionGradients operands{.grad_output = grad.const_data_ptr(),
                                .query = c.query.const_data_ptr(),
                                .key = c.key.const_data_ptr(),
                                .value = c.value.const_data_ptr(),
                                .mask = c.mask ? c.mask->const_data_ptr() : nullptr,
                                .output = output.const_data_ptr(),
                                .logsumexp = per_query.const_data_ptr(),
                                .dropout_seed = c.dropout_seed ? c.dropout_seed->const_data_ptr() : nullptr,
                                .grad_query = written(0),
                                .grad_key = written(1),
                                .grad_value = written(2)};
    set_own(operands, c);
    for (size_t i = 0; i < of_own.size(); i++)
      if (of_own[i]) operands.grad_own[i] = of_own[i]->mutable_data_ptr();
    run_backward(chosen, p, operands, c.query);
  } else {
    for (Tensor& t : result) torch::stable::zero_(t);
  }
  for (size_t i = 0; i < gradients; i++) give(stack, static_cast<int>(i), result[i]);
}

// A line of a program: attention_<algorithm> %query %key %value scale=0.125 is_causal=0; a mask is a fourth value. Values have
// four dimensions, or five where each item of the batch is several, such as an image's windows. All are read as they lie, so that
// parts of one product are no copies; the output is (…, L, H, E) in memory, where heads are joined next.
struct AttentionStep final : program::Step {
  AttentionProblem p{};
  const Entry& entry;

  explicit AttentionStep(program::Reader& r) : entry(*r.entry) {
    r.traits<AttentionProblem>();
    const bool masked = r.line.operands.size() == 4;
    r.needs_operands(masked ? 4 : 3);
    const program::Value query = r.operand(0), key = r.operand(1), value = r.operand(2);
    const Sizes &q = query.sizes, &k = key.sizes, &v = value.sizes;
    const size_t rank = q.size();
    bool fits = (rank == 4 || rank == 5) && k.size() == rank && v.size() == rank && query.dtype == key.dtype &&
                query.dtype == value.dtype;
    for (size_t d = 0; fits && d + 3 < rank; d++) fits = q[d] == k[d] && q[d] == v[d];
    if (fits) {
      p.outer = rank == 5 ? q[0] : 1, p.batch = q[rank - 4], p.heads = q[rank - 3], p.kv_heads = k[rank - 3];
      p.queries = q[rank - 2], p.keys = k[rank - 2], p.size = q[rank - 1], p.value_size = v[rank - 1];
      fits = v[rank - 3] == p.kv_heads && v[rank - 2] == p.keys && k[rank - 1] == p.size && p.kv_heads > 0 &&
             p.heads % p.kv_heads == 0;
    }
    r.line.check(fits,
                 "needs query (…, N, H, L, E), key (…, N, H, S, E) and value (…, N, H, S, Ev) of four or five dimensions, got " +
                     to_string(q) + ", " + to_string(k) + " and " + to_string(v));
    p.dtype = query.dtype, p.scale = r.line.real("scale"), p.causal = r.line.word("is_causal", "0") == "1";
    p.parameters = r.parameters();
    read_parameters(entry, p);
    if (masked) {
      const program::Value& m = r.any_operand(3);
      const Sizes scores{p.outer, p.batch, p.heads, p.queries, p.keys};
      fits = m.sizes.size() <= rank && !p.causal && (m.dtype == DType::boolean || m.dtype == p.dtype);
      for (size_t d = 1; fits && d <= m.sizes.size(); d++)
        fits = m.sizes[m.sizes.size() - d] == 1 || m.sizes[m.sizes.size() - d] == scores[scores.size() - d];
      r.line.check(fits, "needs a mask, and is_causal without one, that broadcasts to " + to_string(scores) + ", got " +
                             to_string(m.sizes));
      p.has_mask = true, p.mask_dtype = m.dtype;
    }
    set_threads(p);
    Sizes output = q;
    output.back() = p.value_size;
    r.output(output, p.dtype, rank == 4 ? Sizes{0, 2, 1, 3} : Sizes{0, 1, 3, 2, 4});
  }
  void emit(program::Emitter& e) override {
    auto at = [&](int v, size_t d) {  // the stride of dimension d, counted from the last one
      const Sizes& sizes = e.of(v).sizes;
      return d >= sizes.size() || sizes[sizes.size() - 1 - d] == 1 ? 0 : e.values().position(v).strides[sizes.size() - 1 - d];
    };
    auto strides = [&](int v) { return AttentionStrides{at(v, 4), at(v, 3), at(v, 2), at(v, 1)}; };
    const int query = e.with_rows(e.operand(0)), key = e.with_rows(e.operand(1)), value = e.with_rows(e.operand(2));
    const int mask = p.has_mask ? e.operand(3) : -1;
    p.query_at = strides(query), p.key_at = strides(key), p.value_at = strides(value), p.output_at = strides(e.value);
    if (p.has_mask) p.mask_at = strides(mask), p.mask_column = at(mask, 0);
    e.step(entry, p, {.query = e.at(query), .key = e.at(key), .value = e.at(value), .mask = e.at(mask), .output = e.output()});
  }
};
AI3_STEPS(attention, AttentionStep)

// Of algorithms that keep the log-sum-exp for a kernel of the gradients, or choose among those. A user's gets PyTorch's.
bool has_gradients(const AlgorithmInfo& info) {
  const auto& traits = reinterpret_cast<const Algorithm<AttentionProblem>&>(info).traits;
  return traits.gradients || traits.choose;
}

// Whether tensors are among the parameters of its own.
bool has_tensors(const AlgorithmInfo& info) {
  const char* const text = reinterpret_cast<const Algorithm<AttentionProblem>&>(info).traits.parameters;
  return text && std::strstr(text, "Tensor");
}
bool has_three_gradients(const AlgorithmInfo& info) { return has_gradients(info) && !has_tensors(info); }
bool has_more_gradients(const AlgorithmInfo& info) { return has_gradients(info) && has_tensors(info); }

#define AI3_ATTENTION_ARGUMENTS                                                                                            \
  "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, *, float? " \
  "scale=None, bool enable_gqa=False"
#define AI3_ATTENTION_GRADIENTS(COUNT)                                                                                      \
  "(Tensor grad_output, Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor output, Tensor logsumexp, float " \
  "dropout_p, bool is_causal, bool[" COUNT                                                                                  \
  "] output_mask, *, float? scale=None, bool enable_gqa=False, Tensor? dropout_seed=None) "
constexpr OperatorKind kinds[] = {
    {"attention_", "", AI3_ATTENTION_ARGUMENTS ") -> Tensor", forward<false>, nullptr},
    {"_attention_", "_forward", AI3_ATTENTION_ARGUMENTS ", Tensor? dropout_seed=None) -> (Tensor output, Tensor logsumexp)",
     forward<true>, has_gradients},
    {"_attention_", "_backward", AI3_ATTENTION_GRADIENTS("3") "-> (Tensor, Tensor, Tensor)", backward<3>, has_three_gradients},
    {"_attention_", "_backward",
     AI3_ATTENTION_GRADIENTS("8") "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)", backward<8>,
     has_more_gradients},
};
AI3_OPERATION(attention, "batch heads kv_heads queries keys size value_size has_mask is_causal has_dropout projected", kinds,
              std::size(kinds), nullptr, 0, AI3_QUERIES(AttentionProblem, problem_from))

// linformer with its projections by position. It has no kernels of its own: the dispatcher takes it for the operator that it
// calls, whose rules for gradients, batches and tracing are its own, too.
void call_projected(StableIValue* stack, uint64_t arguments, uint64_t results) {
  if (arguments != 6 || results != 1)
    throw std::runtime_error("ai3::attention_linformer.projected: takes 6 arguments and has 1 results, was called with " +
                             std::to_string(arguments) + " and " + std::to_string(results));
  Arguments in(stack);
  const Tensor query = in.take<Tensor>(), key = in.take<Tensor>(), value = in.take<Tensor>();
  const Tensor key_projection = in.take<Tensor>(), value_projection = in.take<Tensor>();
  const auto scale = in.take<std::optional<double>>();
  give(stack, 0,
       call_aten("ai3::attention_linformer", "", query, key, value, std::optional<Tensor>(), 0.0, false, scale, false,
                 key_projection, value_projection));
}

}  // namespace
}  // namespace ai3::ops

STABLE_TORCH_LIBRARY_FRAGMENT(ai3, m) {
  m.def(
      "attention_linformer.projected(Tensor query, Tensor key, Tensor value, Tensor key_projection, Tensor value_projection, *, "
      "float? scale=None) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(ai3, CompositeImplicitAutograd, m) {
  m.impl("attention_linformer.projected", &ai3::ops::call_projected);
}
