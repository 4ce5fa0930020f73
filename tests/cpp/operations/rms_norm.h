// rms_norm: problems, and its definition.
#pragma once

inline Extent extent(const ai3::RmsNormProblem& p) {
  const int64_t count = p.rows * p.features;
  return {count, p.has_weight ? p.features : 0, 0, count, p.features + 2};
}

inline Reference reference(const std::string&, const ai3::RmsNormProblem& p, const double* x, const double* w, const double*,
                           const double*, const double*) {
  const int64_t n = p.features;
  Reference result{std::vector<double>(p.rows * n), std::vector<double>(p.rows * n)};
  for (int64_t r = 0; r < p.rows; r++) {
    double squares = 0;
    for (int64_t j = 0; j < n; j++) squares += x[r * n + j] * x[r * n + j] / static_cast<double>(n);
    for (int64_t j = 0; j < n; j++) {
      const double y = x[r * n + j] / std::sqrt(squares + p.eps) * (w ? w[j] : 1);
      result.y[r * n + j] = y;
      result.largest = std::fmax(result.largest, std::fabs(y));
    }
  }
  return result;
}

namespace problems {
inline ai3::RmsNormProblem rms_norm(int64_t rows, int64_t features) {
  return {ai3::DType::f32, 1, rows, features, 1e-5, features % 3 != 0, false};
}
inline std::vector<ai3::RmsNormProblem> all(ai3::RmsNormProblem*, const std::string&) {
  std::vector<ai3::RmsNormProblem> result;
  const int64_t cases[][2] = {{1, 1}, {3, 2}, {5, 7}, {2, 16}, {9, 33}, {1, 768}, {70, 65}, {4, 1000}};
  for (const auto& c : cases) result.push_back(rms_norm(c[0], c[1]));
  return result;
}
inline std::string describe(const ai3::RmsNormProblem& p) {
  return std::to_string(p.rows) + " rows of " + std::to_string(p.features) + (p.has_weight ? " weight" : "");
}
}  // namespace problems

namespace ai3 {
inline void forget_shape(RmsNormProblem& p) { p.rows = -1; }
inline std::vector<RmsNormProblem> sweep(RmsNormProblem*) {
  std::vector<RmsNormProblem> result;
  for (int64_t features = 1; features <= 130; features++) result.push_back(problems::rms_norm(1 + features % 5, features));
  return result;
}
}  // namespace ai3
