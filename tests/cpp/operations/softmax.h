// softmax: problems, and its definition.
#pragma once

inline Extent extent(const ai3::SoftmaxProblem& p) {
  const int64_t count = p.outer * p.size * p.inner;
  return {count, 0, 0, count, p.size + 2};
}

inline Reference reference(const std::string&, const ai3::SoftmaxProblem& p, const double* x, const double*, const double*,
                           const double*, const double*) {
  const int64_t count = extent(p).output;
  Reference result{std::vector<double>(count), std::vector<double>(count)};
  for (int64_t o = 0; o < p.outer; o++)
    for (int64_t i = 0; i < p.inner; i++) {
      auto at = [&](int64_t j) { return (o * p.size + j) * p.inner + i; };
      double most = -INFINITY;
      long double total = 0;  // of thousands, of which float64 would lose bits
      for (int64_t j = 0; j < p.size; j++) most = std::fmax(most, x[at(j)]);
      for (int64_t j = 0; j < p.size; j++) total += std::exp(x[at(j)] - most);
      for (int64_t j = 0; j < p.size; j++) {
        const double y = static_cast<double>(std::exp(x[at(j)] - most) / total);
        result.y[at(j)] = y, result.largest = std::fmax(result.largest, y);
      }
    }
  return result;
}

namespace problems {
inline ai3::SoftmaxProblem softmax(int64_t outer, int64_t size, int64_t inner) {
  return {ai3::DType::f32, 1, outer, size, inner};
}
inline std::vector<ai3::SoftmaxProblem> all(ai3::SoftmaxProblem*, const std::string&) {
  std::vector<ai3::SoftmaxProblem> result;
  const int64_t cases[][3] = {{1, 1, 1}, {5, 7, 1},  {9, 33, 1},   {3, 768, 1}, {2, 5000, 1},
                              {2, 5, 3}, {1, 9, 16}, {3, 70, 130}, {1, 200, 5}, {4, 1, 100}};
  for (const auto& c : cases) result.push_back(softmax(c[0], c[1], c[2]));
  return result;
}
inline std::string describe(const ai3::SoftmaxProblem& p) {
  return std::to_string(p.outer) + "x" + std::to_string(p.size) + "x" + std::to_string(p.inner);
}
}  // namespace problems

namespace ai3 {
inline void forget_shape(SoftmaxProblem& p) { p.outer = p.size = p.inner = -1; }
inline std::vector<SoftmaxProblem> sweep(SoftmaxProblem*) {
  std::vector<SoftmaxProblem> result;
  for (int64_t n = 1; n <= 130; n++) {
    result.push_back(problems::softmax(1 + n % 5, n, 1));
    result.push_back(problems::softmax(1 + n % 3, 1 + n % 7, n));
  }
  return result;
}
}  // namespace ai3
