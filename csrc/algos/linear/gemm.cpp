// y = x * w^T as one packed matrix product (core/gemm.h). With few rows it is bound by the bandwidth at which the packed weight,
// one contiguous stream for each thread, comes from memory; with few outputs by that of x, and rows of both are multiplied as
// they lie.
#include "../conv2d/gradient.h"
#include "packed.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

constexpr auto with_form = [](const LinearProblem& p, const auto& body) {
  return with_type(p.dtype, [&]<class T>() {
    if constexpr (dtype_of<T> == DType::bf16)
      if (has_pair_products()) return body.template operator()<T, Form::pairs>();
    return body.template operator() < T, sizeof(T) == 2 ? Form::narrow : Form::plain > ();
  });
};

// Dot products with each of as many rows as a vector has lanes, one vector of each at a time; then those vectors turn, and their
// sum holds the rows' results. The rows are those of x, or of the weight where it has more.
template <class T>
struct RowDots {
  using A = Acc<T>;
  using V = Vec<A>;
  static constexpr int64_t kOutputs = 8;  // at the most: a pass over x in the cache for each; a panel costs as much as 32

  static bool fits(const LinearProblem& p) { return p.out_features <= kOutputs; }

  const LinearProblem& p;

  void multiply(const LinearOperands& m) const {
    const T* x = m.input.read<T>();
    const A* w = m.weight.read<A>();
    const bool swapped = p.rows < p.out_features;
    Output<T> y{m.output.write<T>(), swapped ? p.y_row : 1, swapped ? 1 : p.y_row};
    y.set_epilogue(p.activation, m), y.bias_per_row = !swapped;
    swapped ? multiply(w, p.in_features, p.out_features, x, p.x_row, p.rows, y)
            : multiply(x, p.x_row, p.rows, w, p.in_features, p.out_features, y);
  }
  // y[i][j]: the dot product of rows j with i of the few others.
  template <class R, class O>
  void multiply(const R* rows, int64_t row_stride, int64_t count, const O* others, int64_t other_stride, int64_t few,
                const Output<T>& y) const {
    parallel_ranges(p.threads, ceil_div(count, V::width), 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t row = begin * V::width; row < smaller(count, end * V::width); row += V::width) {
        const int64_t lanes = smaller(V::width, count - row);
        A sums[kOutputs * V::width];
        for (int64_t i = 0; i < few; i++)
          store(sums + i * V::width, dots(rows + row * row_stride, row_stride, lanes, others + i * other_stride));
        store_block(y.from(0, row), sums, V::width, few, lanes);
      }
    });
  }
  // Lanes behind the rows repeat the last one.
  template <class R, class O>
  V dots(const R* rows, int64_t row_stride, int64_t lanes, const O* other) const {
    const int64_t k = p.in_features;
    V sum[V::width];
    const R* row[V::width];
#pragma GCC unroll 16
    for (int r = 0; r < V::width; r++) sum[r] = A(0), row[r] = rows + smaller(r, lanes - 1) * row_stride;
    int64_t i = 0;
    for (; i + V::width <= k; i += V::width) {
      const V b = load(other + i);
#pragma GCC unroll 16
      for (int r = 0; r < V::width; r++) sum[r] = fma(load(row[r] + i), b, sum[r]);
    }
    if (i < k) {
      const V b = load_partial(other + i, k - i);
#pragma GCC unroll 16
      for (int r = 0; r < V::width; r++) sum[r] = fma(load_partial(row[r] + i, k - i), b, sum[r]);
    }
    transpose(sum);
#pragma GCC unroll 4
    for (int step = V::width / 2; step > 0; step /= 2)
#pragma GCC unroll 8
      for (int r = 0; r < step; r++) sum[r] += sum[r + step];
    return sum[0];
  }
};

int64_t linear_gemm_workspace(const LinearProblem& p) { return RowDots<float>::fits(p) ? 0 : product_workspace(p, with_form); }
int64_t linear_gemm_packed_bytes(const LinearProblem& p) {
  if (!RowDots<float>::fits(p)) return product_packed_bytes(p, with_form);
  return with_type(p.dtype, [&]<class T>() { return workspace_bytes<Acc<T>>(checked_mul(p.out_features, p.in_features)); });
}
void linear_gemm_pack(const LinearProblem& p, const void* weight, void* packed) {
  if (!RowDots<float>::fits(p)) return product_pack(p, weight, packed, with_form);
  with_type(p.dtype, [&]<class T>() {
    copy_widened(static_cast<const T*>(weight), p.out_features * p.in_features, static_cast<Acc<T>*>(packed));
  });
}

template <class T>
void linear_gemm(const LinearProblem& p, const LinearOperands& m, Workspace& workspace) {
  if (p.rows == 0) return;
  if (RowDots<T>::fits(p)) return RowDots<T>{p}.multiply(m);
  with_form(p, [&]<class Type, Form form>() { PackedProduct<Type, form>{p}.multiply(m, workspace); });
}

// dX = dY W is the same product, of W as it lies; dW = dY^T X is that of a convolution with a 1x1 kernel.
LinearProblem transposed(const LinearProblem& p) {
  LinearProblem t = p;
  t.in_features = t.x_row = p.out_features, t.out_features = t.y_row = p.in_features;
  t.activation = Activation::none, t.has_bias = t.has_residual = false;
  return t;
}
Conv2dProblem as_convolution(const LinearProblem& p) {
  Conv2dProblem c{};
  c.dtype = p.dtype, c.threads = p.threads, c.batch = c.groups = 1;
  c.in_channels = p.in_features, c.out_channels = p.out_features;
  c.in_height = c.out_height = c.kernel_height = c.kernel_width = 1, c.in_width = c.out_width = p.rows;
  c.stride_h = c.stride_w = c.dilation_h = c.dilation_w = 1;
  c.x_stride = {p.rows * p.in_features, 1, p.rows * p.in_features, p.in_features};
  c.y_stride = {p.rows * p.out_features, 1, p.rows * p.out_features, p.out_features};
  return c;
}
int64_t linear_gemm_backward_workspace(const LinearProblem& p, const WeightedGradients& m) {
  const LinearProblem t = transposed(p);
  return with_type(p.dtype, [&]<class T>() {
    using A = Acc<T>;
    const int64_t copies = workspace_bytes<A>(checked_mul(p.threads, PackedProduct<T, Form::plain>{t}.copy_size()));
    const int64_t input = checked_add(workspace_bytes<A>(packed_size<A>(t.in_features, t.out_features)), copies);
    return checked_add(m.grad_input ? input : 0, m.grad_weight ? WeightGradient<T>(as_convolution(p)).workspace() : 0);
  });
}
void linear_gemm_backward(const LinearProblem& p, const WeightedGradients& m, Workspace& workspace) {
  with_type(p.dtype, [&]<class T>() {
    if (m.grad_input) {
      constexpr int64_t P = kPanel<Acc<T>>;
      const LinearProblem t = transposed(p);
      Acc<T>* packed = workspace.take<Acc<T>>(packed_size<Acc<T>>(t.in_features, t.out_features));
      parallel_for(p.threads, panel_count<Acc<T>>(t.out_features), [&](int64_t i, int) {
        const int64_t columns = smaller(P, t.out_features - i * P);
        Acc<T>* panel = packed + i * t.in_features * P;
        if (columns < P) clear(panel, t.in_features * P);
        copy_rows(m.weight.read<T>() + i * P, t.out_features, 1, t.in_features, columns, panel, P);
      });
      PackedProduct<T, Form::plain>{t}.multiply({m.grad_output, packed, nullptr, nullptr, m.grad_input}, workspace);
    }
    if (m.grad_weight) {
      const Conv2dProblem c = as_convolution(p);
      WeightGradient<T>(c).run(m.grad_output.read<T>(), m.input.read<T>(), m.grad_weight.write<T>(), m.grad_bias.write<T>(),
                               workspace);
    }
  });
}
GradientNames linear_gemm_gradients(const LinearProblem&) { return {"gemm", "gemm"}; }

Cost linear_gemm_cost(const LinearProblem& p) { return product_cost(p, with_form); }

AI3_ALGORITHM(linear, gemm, .epilogue = true, .workspace = linear_gemm_workspace, .cost = linear_gemm_cost,
              .packed_bytes = linear_gemm_packed_bytes, .pack = linear_gemm_pack, .gradients = linear_gemm_gradients,
              .backward = linear_gemm_backward, .backward_workspace = linear_gemm_backward_workspace, .sliced = true)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL
