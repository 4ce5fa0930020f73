// batch_norm: problems, and its definition. The bias is its mean as well, and the weight its variance: eps is so large that no
// root is of less than zero.
#pragma once

inline Extent extent(const ai3::BatchNormProblem& p) {
  const int64_t count = p.of.batch * p.of.channels * p.of.pixels;
  return {count, p.of.channels, p.of.channels, count, 3};
}

inline Reference reference(const std::string&, const ai3::BatchNormProblem& p, const double* x, const double* w, const double* b,
                           const double*, const double*) {
  const int64_t count = extent(p).output;
  Reference result{std::vector<double>(count), std::vector<double>(count)};
  for (int64_t i = 0; i < count; i++) {
    const int64_t c = p.of.last ? i % p.of.channels : i / p.of.pixels % p.of.channels;
    result.y[i] = (x[i] - b[c]) / std::sqrt(w[c] + p.eps) * (p.has_weight ? w[c] : 1) + (p.has_bias ? b[c] : 0);
    result.largest = std::fmax(result.largest, std::fabs(result.y[i]));
  }
  return result;
}

namespace problems {
inline ai3::BatchNormProblem batch_norm(ai3::Channels of) { return {ai3::DType::f32, 1, of, 1e3, false, true, true, false}; }
inline std::vector<ai3::BatchNormProblem> all(ai3::BatchNormProblem*, const std::string&) {
  std::vector<ai3::BatchNormProblem> result;
  const int64_t cases[][3] = {{1, 1, 5}, {2, 6, 35}, {3, 8, 1}, {1, 70, 300}, {1, 33, 17}, {5, 4, 600}};
  for (const auto& c : cases)
    for (bool last : {false, true}) result.push_back(batch_norm({c[0], c[1], c[2], last}));
  return result;
}
inline std::string describe(const ai3::BatchNormProblem& p) {
  return std::to_string(p.of.batch) + "x" + std::to_string(p.of.channels) + "x" + std::to_string(p.of.pixels) +
         (p.of.last ? " nhwc" : "");
}
}  // namespace problems

namespace ai3 {
inline void forget_shape(BatchNormProblem& p) { p.of.batch = p.of.pixels = -1; }
inline std::vector<BatchNormProblem> sweep(BatchNormProblem*) {
  std::vector<BatchNormProblem> result;
  for (int64_t n = 1; n <= 70; n++)
    for (bool last : {false, true}) {
      result.push_back(problems::batch_norm({1 + n % 3, 1 + n % 5, n, last}));
      result.push_back(problems::batch_norm({1, n, 1 + n % 7, last}));
    }
  return result;
}
}  // namespace ai3
