// Packed matrix multiplication, C = A * B, after Goto & van de Geijn (2008) and BLIS (Van Zee & van de Geijn 2015): B lies in
// panels of two vectors' width; a micro-kernel keeps up to kRows rows of one panel's columns in registers and reads A element by
// element. Sums stay in registers over a block of k and in the accumulator's type between blocks: they are never rounded to a
// storage type, and do not depend on blocks or threads.
//
// Panels of B: [ceil(n / kPanel)][k][kPanel], the last one zero-padded. The panels of a weight also serve as A of the transposed
// product, so that one packing serves both layouts of a convolution:
//   NHWC: rows are pixels, columns are output channels; A is the patches, B the packed weight (gemm_rows).
//   NCHW: rows are output channels, columns are pixels; A is the packed weight, B the packed patches (gemm_columns).
#pragma once
#include "micro_kernel.h"
#include "tiles.h"

namespace ai3::inline AI3_LEVEL {

// ---- Output ------------------------------------------------------------------------------------------------------------------

// Where a product goes: activation(product + bias + residual), narrowed to T. One of the two strides is 1.
template <class T>
struct Output {
  T* data;
  int64_t row_stride, column_stride = 1;
  const T* bias = nullptr;
  bool bias_per_row = false;
  const T* residual = nullptr;  // laid out as data, or data itself
  Activation activation = Activation::none;
  const Acc<T>* slope = nullptr;  // per row or column, as the bias
  bool add = false;               // onto what is there; only where T is the accumulator type

  template <class Operands>
  AI3_INLINE void set_epilogue(Activation a, const Operands& m) {
    bias = m.bias.template read<T>(), residual = m.residual.template read<T>();
    activation = a, slope = m.slope.template read<Acc<T>>();
  }
  AI3_INLINE bool plain() const { return !bias && !residual && activation == Activation::none && column_stride == 1; }
  // The output of one block of k: the first one adds the residual, the last one the bias, and applies the activation.
  AI3_INLINE Output part(bool first, bool last) const {
    Output o = *this;
    if (!first) o.residual = nullptr, o.add = true;
    if (!last) o.bias = nullptr, o.activation = Activation::none;
    return o;
  }
  AI3_INLINE Output from(int64_t row, int64_t column) const {
    Output o = *this;
    const int64_t shift = row * row_stride + column * column_stride;
    o.data += shift;
    if (residual) o.residual += shift;
    if (bias) o.bias += bias_per_row ? row : column;
    if (slope) o.slope += bias_per_row ? row : column;
    return o;
  }
};

// The epilogue on the first `count` lanes of `sums`, which go to out.data + shift, from channel `channel` of bias and slope on;
// these are vectors too, or one value.
template <bool called, class T>
AI3_INLINE void store_vector(const Output<T>& out, int64_t shift, Vec<Acc<T>> sums, int64_t channel, bool one_bias,
                             int64_t count) {
  constexpr int width = Vec<Acc<T>>::width;
  const T *bias = out.bias ? out.bias + channel : nullptr, *residual = out.residual ? out.residual + shift : nullptr;
  if (bias && one_bias) sums += Vec<Acc<T>>(widen(*bias));
  if (count >= width) {
    if (bias && !one_bias) sums += load(bias);
    if (residual) sums += load(residual);
    auto slopes = [&] { return one_bias ? Vec<Acc<T>>(out.slope[channel]) : load(out.slope + channel); };
    store(out.data + shift, activate_stored<called>(out.activation, sums, slopes));
  } else {
    if (bias && !one_bias) sums += load_partial(bias, count);
    if (residual) sums += load_partial(residual, count);
    auto slopes = [&] { return one_bias ? Vec<Acc<T>>(out.slope[channel]) : load_partial(out.slope + channel, count); };
    store_partial(out.data + shift, activate_stored<called>(out.activation, sums, slopes), count);
  }
}
// Stores rows x columns sums with the epilogue. Rows of `sums` can be read in whole vectors. Where columns of the output are
// contiguous, squares of sums turn in registers.
template <bool called, class T>
void store_block_as(const Output<T>& out, const Acc<T>* sums, int64_t lds, int64_t rows, int64_t columns) {
  constexpr int width = Vec<Acc<T>>::width;
  auto channel_of = [&](int64_t row, int64_t column) { return out.bias_per_row ? row : column; };
  if (out.column_stride == 1) {
    for (int64_t r = 0; r < rows; r++)
      for (int64_t c = 0; c < columns; c += width)
        store_vector<called>(out, r * out.row_stride + c, load(sums + r * lds + c), channel_of(r, c), out.bias_per_row,
                             columns - c);
    return;
  }
  for (int64_t r0 = 0; r0 < rows; r0 += width)
    for (int64_t c0 = 0; c0 < columns; c0 += width) {
      Vec<Acc<T>> square[width];
#pragma GCC unroll 16
      for (int r = 0; r < width; r++) square[r] = r < rows - r0 ? load(sums + (r0 + r) * lds + c0) : Vec<Acc<T>>(Acc<T>{0});
      transpose(square);
#pragma GCC unroll 16
      for (int c = 0; c < width; c++)
        if (c < columns - c0)
          store_vector<called>(out, r0 * out.row_stride + (c0 + c) * out.column_stride, square[c], channel_of(r0, c0 + c),
                               !out.bias_per_row, rows - r0);
    }
}
template <class T>
void store_block(const Output<T>& out, const Acc<T>* sums, int64_t lds, int64_t rows, int64_t columns) {
  is_called(out.activation) ? store_block_as<true>(out, sums, lds, rows, columns)
                            : store_block_as<false>(out, sums, lds, rows, columns);
}

// ---- One thread --------------------------------------------------------------------------------------------------------------

// A slab of at most kRows rows times one panel, of which `columns` are used. Sums start from 0; the bias and what is there
// (earlier sums, or a residual that lies where the output does) are added to them, since the rounding errors of a long sum grow
// with its length and with the size of what it starts from (Higham, "Accuracy and Stability of Numerical Algorithms", 2002, 4.2).
// The rest of the epilogue follows while the tile is in the L1 cache.
template <class T, class Rows, class Stored>
AI3_INLINE void multiply_slab(const Rows& rows, int64_t row_count, const Stored* panel, int64_t columns, int64_t k,
                              const Output<T>& out, Next next) {
  using A = Acc<T>;
  constexpr int P = kPanel<A>;
  constexpr bool same = sizeof(T) == sizeof(A);
  const bool onto_residual = same && out.residual == out.data, add = out.add || onto_residual;
  const bool half = columns <= Vec<A>::width;
  const bool whole = (half ? columns == Vec<A>::width : columns == P) && out.column_stride == 1,
             biased = out.bias && !out.bias_per_row && (k > 0 || !add);
  alignas(64) A bias[P] = {};
  Output<T> rest = out;
  if (biased) rest.bias = nullptr;
  if (onto_residual) rest.residual = nullptr;
  auto tile = [&]<class C>(const A* of_columns, C* c, int64_t ldc, const A* residual = nullptr,
                           Activation activation = Activation::none) {
    const Tile<A, C> t{of_columns,
                       c,
                       ldc,
                       reinterpret_cast<const char*>(out.data),
                       out.row_stride * static_cast<int64_t>(sizeof(T)),
                       next,
                       residual,
                       activation};
    if (half)
      multiply_tile<A, false, true>(row_count, rows, panel, k, t);
    else
      multiply_tile<A>(row_count, rows, panel, k, t);
  };
  if constexpr (same)
    if (whole) {
      const A *const of_columns = biased ? out.bias : bias, *const onto = add ? out.data : rest.residual;
      const bool adds_once = !rest.bias && !(add && rest.residual);
      if (k > 0 && adds_once && is_applied_in_registers(rest.activation, onto))
        return tile(of_columns, out.data, out.row_stride, onto, rest.activation);
      if (k > 0 || !add) tile(of_columns, out.data, out.row_stride, add ? onto : nullptr);
      if (!rest.plain()) store_block(rest, out.data, out.row_stride, row_count, columns);
      return;
    }
  if (biased)
    for (int64_t i = 0; i < columns; i++) bias[i] = widen(out.bias[i]);
  if constexpr (requires { Rows::pairs; } && !same)
    if (whole && rest.plain()) return tile(bias, out.data, out.row_stride);
  alignas(64) A sums[kRows * P];
  tile(bias, sums, P);
  if constexpr (same)
    if (add)
      for (int64_t r = 0; r < row_count; r++)
        for (int64_t i = 0; i < columns; i++) sums[r * P + i] += out.data[r * out.row_stride + i * out.column_stride];
  store_block(rest, sums, P, row_count, columns);
}

// out[rows][columns] (=, +=) A * B; A as StridedRows or IndirectRows. The operand in the inner loop stays in the L2 cache, the
// other one passes once: the next slab is prefetched evenly over the panels of the slab before it, and the next panel over the
// slabs of the panel before it. For that two panels have to stay in the cache with the rows: longer ones are multiplied a part of
// k at a time, whose sums wait in the output (docs/decisions/gemm.md); where it cannot hold them, a panel is prefetched a little
// ahead. Parts depend on k and the types alone, so that threads' shares do not change the order of sums. Panels lie panel_stride
// apart: k * kPanel where B is the whole of the packed matrix, more where it is a part of k.
template <class T, class Rows, class Stored>
void gemm_block(const Rows& a, int64_t rows, const Stored* panels, int64_t panel_stride, int64_t columns, int64_t k,
                const Output<T>& out) {
  constexpr int64_t P = kPanel<Acc<T>>, kStep = P * static_cast<int64_t>(sizeof(Stored)), kPanelsBytes = 256 << 10,
                    kMostSteps = kPanelsBytes / 2 / kStep, kSpread = 16, kNear = 8192;
  constexpr bool divisible = sizeof(T) == sizeof(Acc<T>) && requires { a.skip(k); };  // T holds sums, rows can begin inside k
  if (rows <= 0 || columns <= 0) return;
  int64_t slab = kRows;  // rows
  if constexpr (requires { a.slab(); }) slab = a.slab();
  const int64_t slabs = ceil_div(rows, slab), panel_total = ceil_div(columns, P);
  int64_t grain = 1, parts = 1;
  if constexpr (divisible)
    if (k > kMostSteps && a.grain() <= kMostSteps && out.column_stride == 1)
      grain = a.grain(), parts = ceil_div(k / grain, kMostSteps / grain);
  auto part_of_k = [&](int64_t i) {
    if (parts == 1) return Share{0, k};  // without the divisions, which a short product would notice
    const Share units = share(k / grain, parts, i);
    return Share{units.begin * grain, units.end * grain};
  };
  auto tile = [&](int64_t s, int64_t q, int64_t i, const Share& part, Next next) {
    const Share r = share(rows, slabs, s);
    Rows from = a.from(r.begin);
    if constexpr (divisible)
      if (i > 0) from = from.skip(part.begin);
    multiply_slab<T>(from, r.end - r.begin, panels + q * panel_stride + part.begin * P, columns - q * P < P ? columns - q * P : P,
                     part.end - part.begin, out.from(r.begin, q * P).part(i == 0, i == parts - 1), next);
  };
  if (columns < rows && columns * k * static_cast<int64_t>(sizeof(Stored)) <= kPanelsBytes) {
    const int64_t slab_bytes = slab * a.row_bytes(), step = slab_bytes / (panel_total * larger(1, k));
    for (int64_t s = 0; s < slabs; s++) {
      const char* next_slab = a.address() + slab_bytes * (s + 1 < slabs ? s + 1 : s);
      for (int64_t q = 0; q < panel_total; q++)
        for (int64_t i = 0; i < parts; i++) {
          const Share part = part_of_k(i);
          tile(s, q, i, part, {next_slab + (q * k + part.begin) * step, step});
        }
    }
    return;
  }
  for (int64_t q = 0; q < panel_total; q++)
    for (int64_t i = 0; i < parts; i++) {
      const bool last = i == parts - 1;
      const Share part = part_of_k(i), following = part_of_k(last ? 0 : i + 1);
      const int64_t length = part.end - part.begin;
      const bool near = slabs == 1 || length > kMostSteps;
      const Stored *panel = panels + q * panel_stride, *next_panel = last && q + 1 < panel_total ? panel + panel_stride : panel;
      const char *here = reinterpret_cast<const char*>(panel + part.begin * P),
                 *next = near ? here + kNear : reinterpret_cast<const char*>(next_panel + following.begin * P);
      const int64_t spread = near ? 1 : smaller(slabs, kSpread),
                    step = near ? kStep : ceil_div(kStep * (following.end - following.begin), larger(1, spread * length));
      for (int64_t s = 0; s < slabs; s++) tile(s, q, i, part, s < spread ? Next{next + s * step * length, step} : Next{here, 0});
    }
}

// Stores the sums of a slab, after a panel's bias where it is one of columns.
template <class T>
AI3_INLINE void store_sums(Output<T> out, float* sums, int64_t rows, int64_t columns, const float* bias) {
  constexpr int64_t P = kPanel<float>;
  if (bias) {
    out.bias = nullptr;
    const Vec<float> left = load(bias), right = load(bias + P / 2);
    for (int64_t r = 0; r < rows; r++) {
      store(sums + r * P, load(sums + r * P) + left);
      store(sums + r * P + P / 2, load(sums + r * P + P / 2) + right);
    }
  }
  if constexpr (sizeof(T) == sizeof(float)) {
    if (out.add)
      for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) sums[r * P + c] += out.data[r * out.row_stride + c * out.column_stride];
  } else if (columns == P && out.plain()) {
    for (int64_t r = 0; r < rows; r++)
      store_rounded(out.data + r * out.row_stride, load(sums + r * P), load(sums + r * P + P / 2));
    return;
  }
  store_block(out, sums, P, rows, columns);
}
// Rows of pairs, in tiles. A part of k at a time, so that a slab's rows and a panel of it stay in the L1 cache: the latency of
// tile loads is not hidden, and from the L2 cache both operands take half as long again. Between parts the sums of a group of
// slabs, whose rows stay in the L2 cache, lie in a buffer, where the epilogue takes them (docs/decisions/tiles.md).
template <class T>
void multiply_in_tiles(const PairRows& a, int64_t rows, const float* panels, int64_t panel_stride, int64_t columns, int64_t k,
                       const Output<T>& out) {
  constexpr int64_t P = kPanel<Acc<T>>, kPart = 8, kGroup = 10, kGroupBytes = 960 << 10;  // steps of a part, slabs of a group
  static_assert(P == kSlabColumns);
  alignas(64) float sums[kGroup * kSlabRows * P];
  const TileSteps steps(k);
  const int64_t whole_parts = ceil_div(steps.count, kPart), parts = whole_parts + (steps.rest > 0),
                panel_total = ceil_div(columns, P), height = ceil_div(rows, ceil_div(rows, kSlabRows)),
                apart = parts > 1 ? height * P : 0,
                group = height * larger(1, smaller(kGroup, kGroupBytes / (kSlabRows * k * 4)));
  const bool biased = out.bias && !out.bias_per_row;
  int64_t configured_rows = 0, configured_pairs = 0;
  auto multiply_panel = [&](int64_t first, int64_t last, int64_t q) {
    const int64_t used = smaller(P, columns - q * P), slabs = ceil_div(last - first, height),
                  next_panel = q + 1 < panel_total ? q + 1 : 0;
    alignas(64) float zeros[P] = {}, bias[P] = {};
    if (biased)
      for (int64_t c = 0; c < used; c++) bias[c] = widen(out.bias[q * P + c]);
    for (int64_t i = 0; i < parts; i++) {
      const bool is_rest = i == whole_parts, is_last = i == parts - 1;
      const Share part = is_rest ? Share{0, 1} : share(steps.count, whole_parts, i);
      const int64_t step = is_rest ? steps.rest : steps.step, from = is_rest ? k - steps.rest : part.begin * step;
      // The same part of the next panel, a share of it for each slab.
      const char* next = reinterpret_cast<const char*>(panels + next_panel * panel_stride + from * P);
      const int64_t ahead = round_up(ceil_div(step * P * 4, slabs), 64);
      float* own = sums;
      for (int64_t row = first; row < last; row += height, own += apart, next += ahead * part.size()) {
        const int64_t count = smaller(height, last - row);
        if (count != configured_rows || step != configured_pairs) {
          configured_rows = count, configured_pairs = step;
          amx::configure(amx::Shapes(count, step));
        }
        multiply_tiles(count, used, a.from(row).address() + from * 4, a.row_bytes(), panels + q * panel_stride + from * P,
                       part.size(), step, i == 0 ? zeros : own, i == 0 ? 0 : P, own, next, ahead);
        if (!is_last) continue;
        // The lines of the next panel's outputs come into the L2 cache: rows lie on pages of their own, where no prefetcher of
        // the hardware has them ready.
        for (int64_t r = 0; r < count; r++)
          __builtin_prefetch(out.data + (row + r) * out.row_stride + next_panel * P * out.column_stride, 1, 2);
        store_sums(out.from(row, q * P), own, count, used, biased ? bias : nullptr);
      }
    }
  };
  for (int64_t first = 0; first < rows; first += group)
    for (int64_t q = 0; q < panel_total; q++) multiply_panel(first, smaller(rows, first + group), q);
  amx::release();
}
template <class T>
void gemm_block(const PairRows& a, int64_t rows, const float* panels, int64_t panel_stride, int64_t columns, int64_t k,
                const Output<T>& out) {
  if constexpr (AI3_VECTOR_BYTES == 64)
    if (fills_tiles(rows, k)) return multiply_in_tiles<T>(a, rows, panels, panel_stride, columns, k, out);
  gemm_block<T, PairRows, float>(a, rows, panels, panel_stride, columns, k, out);
}
template <class T, class Rows>
AI3_INLINE void gemm_block(const Rows& a, int64_t rows, const Acc<T>* panels, int64_t columns, int64_t k, const Output<T>& out) {
  gemm_block<T>(a, rows, panels, k * kPanel<Acc<T>>, columns, k, out);
}
// The same with the columns of packed panels `a` as rows.
template <class T>
void gemm_block(const PanelRows<Acc<T>>& a, int64_t rows, const Acc<T>* panels, int64_t columns, int64_t k,
                const Output<T>& out) {
  constexpr int64_t P = kPanel<Acc<T>>;
  for (int64_t p = 0; p < rows; p += P) {
    const int64_t n = rows - p < P ? rows - p : P, slabs = ceil_div(n, kRows);
    for (int64_t s = 0; s < slabs; s++) {
      const Share r = share(n, slabs, s);
      for (int64_t c = 0; c < columns; c += P)
        multiply_slab<T>(PanelRows<Acc<T>>{a.data + p * k}.from(r.begin), r.end - r.begin, panels + c * k,
                         columns - c < P ? columns - c : P, k, out.from(p + r.begin, c),
                         {reinterpret_cast<const char*>(panels + c * k), 0});
    }
  }
}
// c[rows][columns] (=, +=) a[rows][k] * B, for use inside other kernels.
template <class A>
AI3_INLINE void gemm_block(const A* a, int64_t lda, int64_t rows, const A* panels, int64_t columns, int64_t k, A* c, int64_t ldc,
                           bool add) {
  Output<A> out{c, ldc};
  out.add = add;
  gemm_block<A>(StridedRows<A>{a, lda}, rows, panels, columns, k, out);
}

// Packs b[k][columns], whose elements lie at k_stride and column_stride, into panels `panel_stride` elements apart (k * kPanel
// where the matrix is packed whole, more where it is a part of one that is longer in k).
template <class T, class Stored>
void pack_panels(const T* b, int64_t k, int64_t columns, int64_t k_stride, int64_t column_stride, Stored* panels,
                 int64_t panel_stride) {
  constexpr int P = kPanel<Acc<T>>;
  for (int64_t c = 0; c < columns; c += P, panels += panel_stride) {
    const int64_t n = columns - c < P ? columns - c : P;
    const T* from = b + c * column_stride;
    int64_t i = 0;
    if (k_stride == 1 && n == P)  // squares turn in registers
      for (constexpr int width = P / 2; i + width <= k; i += width)
        for (int half = 0; half < 2; half++) {
          Vec<Acc<T>> square[width];
#pragma GCC unroll 16
          for (int j = 0; j < width; j++) square[j] = load(from + (half * width + j) * column_stride + i);
          transpose(square);
#pragma GCC unroll 16
          for (int j = 0; j < width; j++) store(panels + (i + j) * P + half * width, square[j]);
        }
    for (; i < k; i++) {
      Stored* to = panels + i * P;
      for (int64_t j = 0; j < n; j++) to[j] = narrowed<Stored>(widen(from[i * k_stride + j * column_stride]));
      for (int64_t j = n; j < P; j++) to[j] = {};
    }
  }
}

// Packs the columns of b, `column_stride` apart and contiguous in k, as pairs of bfloat16 along k, an odd last one with 0: panels
// of ceil(k / 2) steps, which PairRows multiply. Elements times `factor`.
template <class T>
void pack_pair_panels(const T* b, int64_t k, int64_t columns, int64_t column_stride, float* panels, int64_t panel_stride,
                      float factor = 1) {
  constexpr int width = Vec<float>::width, P = kPanel<float>;
  const Vec<float> by(factor);
  for (int64_t c = 0; c < columns; c += width, panels += c % P ? width : panel_stride - width)
    for (int64_t i = 0; i < k; i += 2 * width) {
      const int64_t rest = k - i;
      Vec<float> square[width];
#pragma GCC unroll 16
      for (int j = 0; j < width; j++) {
        square[j] = Vec<float>(0.f);
        if (c + j >= columns) continue;
        const T* from = b + (c + j) * column_stride + i;
        const Vec<float> left = load_some(from, smaller(width, rest)),
                         right = rest > width ? load_some(from + width, smaller(width, rest - width)) : Vec<float>(0.f);
        bfloat16 pairs[2 * width];
        store_rounded(pairs, left * by, right * by);
        __builtin_memcpy(&square[j], pairs, sizeof(pairs));
      }
      transpose(square);
#pragma GCC unroll 16
      for (int j = 0; j < width; j++)
        if (2 * j < rest) store(panels + (i / 2 + j) * P, square[j]);
    }
  if (const int64_t rest = columns % P; rest > 0 && rest <= width)  // the second half of the last panel
    for (int64_t i = 0; i < ceil_div(k, 2); i++) store(panels + i * P, Vec<float>(0.f));
}

template <class T>
AI3_INLINE void copy_widened(const T* from, int64_t count, Acc<T>* to) {
  using V = Vec<Acc<T>>;
  int64_t i = 0;
  for (; i + V::width <= count; i += V::width) store(to + i, load(from + i));
  if (i < count) store_partial(to + i, load_partial(from + i, count - i), count - i);
}

}  // namespace ai3::inline AI3_LEVEL
