// group_norm: problems, and its definition.
#pragma once

inline Extent extent(const ai3::GroupNormProblem& p) {
  const int64_t count = p.of.batch * p.of.channels * p.of.pixels;
  return {count, p.has_weight ? p.of.channels : 0, p.has_bias ? p.of.channels : 0, count,
          p.of.channels / p.groups * p.of.pixels + 2};
}

inline Reference reference(const std::string&, const ai3::GroupNormProblem& p, const double* x, const double* w, const double* b,
                           const double*, const double*) {
  const int64_t each = p.of.channels / p.groups, count = extent(p).output, n = each * p.of.pixels;
  Reference result{std::vector<double>(count), std::vector<double>(count)};
  auto at = [&](int64_t image, int64_t channel, int64_t pixel) {
    return p.of.last ? (image * p.of.pixels + pixel) * p.of.channels + channel
                     : (image * p.of.channels + channel) * p.of.pixels + pixel;
  };
  for (int64_t i = 0; i < p.of.batch * p.groups; i++) {
    const int64_t image = i / p.groups, first = i % p.groups * each;
    long double mean = 0, variance = 0;
    for (int64_t j = 0; j < n; j++) mean += x[at(image, first + j / p.of.pixels, j % p.of.pixels)];
    mean /= static_cast<long double>(n);
    for (int64_t j = 0; j < n; j++) {
      const long double d = x[at(image, first + j / p.of.pixels, j % p.of.pixels)] - mean;
      variance += d * d / static_cast<long double>(n);
    }
    for (int64_t j = 0; j < n; j++) {
      const int64_t channel = first + j / p.of.pixels, e = at(image, channel, j % p.of.pixels);
      const double h = static_cast<double>((x[e] - mean) / std::sqrt(variance + static_cast<long double>(p.eps)));
      result.y[e] = h * (w ? w[channel] : 1) + (b ? b[channel] : 0);
      result.largest = std::fmax(result.largest, std::fabs(result.y[e]));
    }
  }
  return result;
}

namespace problems {
inline ai3::GroupNormProblem group_norm(ai3::Channels of, int64_t groups) {
  return {ai3::DType::f32, 1, of, groups, 1e-5, true, of.channels % 3 != 0, false};
}
inline std::vector<ai3::GroupNormProblem> all(ai3::GroupNormProblem*, const std::string&) {
  std::vector<ai3::GroupNormProblem> result;
  const int64_t cases[][4] = {{1, 1, 5, 1},   {2, 6, 35, 3},  {3, 8, 1, 2},    {1, 70, 300, 5},
                              {1, 33, 17, 1}, {5, 4, 600, 2}, {1, 3, 20000, 1}};
  for (const auto& c : cases)
    for (bool last : {false, true}) result.push_back(group_norm({c[0], c[1], c[2], last}, c[3]));
  return result;
}
inline std::string describe(const ai3::GroupNormProblem& p) {
  return std::to_string(p.of.batch) + "x" + std::to_string(p.of.channels) + "x" + std::to_string(p.of.pixels) + " of " +
         std::to_string(p.groups) + " groups" + (p.of.last ? " nhwc" : "") + (p.has_weight ? " weight" : "") +
         (p.has_bias ? " bias" : "");
}
}  // namespace problems

namespace ai3 {
inline void forget_shape(GroupNormProblem& p) { p.of.batch = p.of.pixels = -1; }
inline std::vector<GroupNormProblem> sweep(GroupNormProblem*) {
  std::vector<GroupNormProblem> result;
  for (int64_t n = 1; n <= 70; n++)
    for (bool last : {false, true}) {
      result.push_back(problems::group_norm({1 + n % 3, 2 * (1 + n % 5), n, last}, 2));
      result.push_back(problems::group_norm({1, n, 1 + n % 7, last}, 1));
    }
  return result;
}
}  // namespace ai3
