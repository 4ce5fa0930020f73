// Each operation by its definition, in float64: the value, and what its rounding error is proportional to.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "../../csrc/algos/adaptive_avg_pool2d/problem.h"
#include "../../csrc/algos/attention/problem.h"
#include "../../csrc/algos/avg_pool2d/problem.h"
#include "../../csrc/algos/conv1d/problem.h"
#include "../../csrc/algos/flatten/problem.h"
#include "../../csrc/algos/layer_norm/problem.h"
#include "../../csrc/algos/linear/problem.h"
#include "../../csrc/algos/max_pool2d/problem.h"
#include "../../csrc/algos/relu/problem.h"

// Elements of each buffer, and the number of terms in the longest sum.
struct Extent {
  int64_t input, weight, bias, output, terms;
};

inline Extent extent(const ai3::Conv2dProblem& p) {
  const int64_t terms = p.in_channels / p.groups * p.kernel_height * p.kernel_width;
  return {p.batch * p.in_channels * p.in_height * p.in_width, p.out_channels * terms, p.has_bias ? p.out_channels : 0,
          p.batch * p.out_channels * p.out_height * p.out_width, terms + 2};
}
inline Extent extent(const ai3::LinearProblem& p) {
  return {p.rows * p.in_features, p.out_features * p.in_features, p.has_bias ? p.out_features : 0, p.rows * p.out_features,
          p.in_features + 2};
}
inline Extent extent(const ai3::Pool2dProblem& p) {
  return {p.batch * p.channels * p.in_height * p.in_width, 0, 0, p.batch * p.channels * p.out_height * p.out_width,
          p.in_height * p.in_width + 1};
}
inline Extent extent(const ai3::ElementwiseProblem& p) { return {p.count, 0, 0, p.count, 1}; }

// Query, key and value stand where other problems have input, weight and bias.
inline Extent extent(const ai3::AttentionProblem& p) {
  const int64_t all = p.outer * p.batch, rows = all * p.heads * p.queries, keys = all * p.kv_heads * p.keys;
  return {rows * p.size, keys * p.size, keys * p.value_size, rows * p.value_size, p.size + p.keys + 2};
}

// y[i] is the exact value, magnitude[i] the sum of the terms' absolute values, largest the largest |sum| before the activation.
struct Reference {
  std::vector<double> y, magnitude;
  double largest = 0;
};

inline double activate(ai3::Activation a, double v, double slope) {
  switch (a) {
    case ai3::Activation::none: return v;
    case ai3::Activation::relu: return v > 0 ? v : 0;
    case ai3::Activation::relu6: return std::fmin(v > 0 ? v : 0, 6);
    case ai3::Activation::hardswish: return v * std::fmin(std::fmax(v + 3, 0), 6) / 6;
    case ai3::Activation::silu: return v / (1 + std::exp(-v));
    case ai3::Activation::gelu: return v / 2 * (1 + std::erf(v / std::sqrt(2.0)));
    case ai3::Activation::sigmoid: return 1 / (1 + std::exp(-v));
    case ai3::Activation::hardsigmoid: return std::fmin(std::fmax(v + 3, 0), 6) / 6;
    case ai3::Activation::tanh: return std::tanh(v);
    case ai3::Activation::gelu_tanh: return v / 2 * (1 + std::tanh(0.7978845608028654 * (v + 0.044715 * v * v * v)));
    case ai3::Activation::prelu: return v > 0 ? v : slope * v;
    case ai3::Activation::elu: return v > 0 ? v : slope * std::expm1(v);
  }
  return v;
}
// Bias, residual and activation on the sum of products.
inline void finish(Reference& r, int64_t at, double sum, double magnitude, const double* bias, const double* residual,
                   ai3::Activation a, double slope) {
  for (const double* more : {bias, residual})
    if (more) sum += *more, magnitude += std::fabs(*more);
  r.largest = std::fmax(r.largest, std::fabs(sum));
  r.y[at] = activate(a, sum, slope);
  r.magnitude[at] = magnitude;
}

// A row of outputs at a time for each weight, which the compiler can vectorize: most of the tests' time is spent here.
inline Reference reference(const std::string&, const ai3::Conv2dProblem& p, const double* x, const double* w, const double* b,
                           const double* residual, const double* slope) {
  const int64_t cg = p.in_channels / p.groups, kg = p.out_channels / p.groups, count = extent(p).output;
  Reference result{std::vector<double>(count), std::vector<double>(count)};
  std::vector<double> sums(p.out_height * p.out_width), magnitudes(p.out_height * p.out_width);
  for (int64_t n = 0; n < p.batch; n++)
    for (int64_t k = 0; k < p.out_channels; k++) {
      std::fill(sums.begin(), sums.end(), 0), std::fill(magnitudes.begin(), magnitudes.end(), 0);
      for (int64_t c = 0; c < cg; c++)
        for (int64_t r = 0; r < p.kernel_height; r++)
          for (int64_t s = 0; s < p.kernel_width; s++) {
            const double weight = w[((k * cg + c) * p.kernel_height + r) * p.kernel_width + s];
            const int64_t left = s * p.dilation_w - p.pad_w;  // the column that the first output reads
            int64_t begin = 0, end = p.out_width;             // of the outputs that read none of the padding
            while (begin < end && begin * p.stride_w + left < 0) begin++;
            while (end > begin && (end - 1) * p.stride_w + left >= p.in_width) end--;
            for (int64_t i = 0; i < p.out_height; i++) {
              const int64_t h = i * p.stride_h - p.pad_h + r * p.dilation_h;
              if (h < 0 || h >= p.in_height) continue;
              const double* row = x + n * p.x_stride.n + (k / kg * cg + c) * p.x_stride.c + h * p.x_stride.h;
              double *sum = sums.data() + i * p.out_width, *magnitude = magnitudes.data() + i * p.out_width;
              for (int64_t j = begin; j < end; j++) {
                const double term = weight * row[(j * p.stride_w + left) * p.x_stride.w];
                sum[j] += term, magnitude[j] += std::fabs(term);
              }
            }
          }
      for (int64_t i = 0; i < p.out_height; i++)
        for (int64_t j = 0; j < p.out_width; j++) {
          const int64_t at = n * p.y_stride.n + k * p.y_stride.c + i * p.y_stride.h + j * p.y_stride.w;
          finish(result, at, sums[i * p.out_width + j], magnitudes[i * p.out_width + j], b ? b + k : nullptr,
                 residual ? residual + at : nullptr, p.activation, slope ? slope[k] : 0);
        }
    }
  return result;
}

inline Reference reference(const std::string&, const ai3::LinearProblem& p, const double* x, const double* w, const double* b,
                           const double* residual, const double* slope) {
  Reference result{std::vector<double>(p.rows * p.out_features), std::vector<double>(p.rows * p.out_features)};
  for (int64_t m = 0; m < p.rows; m++)
    for (int64_t n = 0; n < p.out_features; n++) {
      double sum = 0, magnitude = 0;
      for (int64_t k = 0; k < p.in_features; k++) {
        const double term = x[m * p.in_features + k] * w[n * p.in_features + k];
        sum += term, magnitude += std::fabs(term);
      }
      const int64_t at = m * p.out_features + n;
      finish(result, at, sum, magnitude, b ? b + n : nullptr, residual ? residual + at : nullptr, p.activation,
             slope ? slope[n] : 0);
    }
  return result;
}

inline Reference reference(const std::string& operation, const ai3::Pool2dProblem& p, const double* x, const double*,
                           const double*, const double*, const double*) {
  const int64_t count = extent(p).output;
  Reference result{std::vector<double>(count), std::vector<double>(count)};
  const bool max = operation == "max_pool2d", adaptive = operation == "adaptive_avg_pool2d";
  for (int64_t n = 0; n < p.batch; n++)
    for (int64_t c = 0; c < p.channels; c++)
      for (int64_t i = 0; i < p.out_height; i++)
        for (int64_t j = 0; j < p.out_width; j++) {
          int64_t h0 = i * p.stride_h - p.pad_h, v0 = j * p.stride_w - p.pad_w;
          int64_t h1 = h0 + (p.kernel_height - 1) * p.dilation_h + 1, v1 = v0 + (p.kernel_width - 1) * p.dilation_w + 1;
          if (adaptive) {
            h0 = i * p.in_height / p.out_height, h1 = ((i + 1) * p.in_height + p.out_height - 1) / p.out_height;
            v0 = j * p.in_width / p.out_width, v1 = ((j + 1) * p.in_width + p.out_width - 1) / p.out_width;
          }
          // A window may reach over the padded input's end in ceil mode; what lies there does not count.
          const int64_t padded = (std::min(h1, p.in_height + p.pad_h) - h0) * (std::min(v1, p.in_width + p.pad_w) - v0);
          const int64_t dh = adaptive || !max ? 1 : p.dilation_h, dv = adaptive || !max ? 1 : p.dilation_w;
          double value = max ? -std::numeric_limits<double>::infinity() : 0, magnitude = 0;
          int64_t inside = 0;
          for (int64_t h = h0; h < h1; h += dh)
            for (int64_t v = v0; v < v1; v += dv) {
              if (h < 0 || h >= p.in_height || v < 0 || v >= p.in_width) continue;
              const double e = x[n * p.x_stride.n + c * p.x_stride.c + h * p.x_stride.h + v * p.x_stride.w];
              value = max ? std::fmax(value, e) : value + e;
              magnitude = max ? std::fabs(value) : magnitude + std::fabs(e);
              inside++;
            }
          const int64_t at = n * p.y_stride.n + c * p.y_stride.c + i * p.y_stride.h + j * p.y_stride.w;
          const int64_t divisor = max                                ? 1
                                  : p.divisor && !adaptive           ? p.divisor
                                  : p.count_include_pad && !adaptive ? padded
                                                                     : inside;
          result.y[at] = value / static_cast<double>(divisor);
          result.magnitude[at] = magnitude / std::fabs(static_cast<double>(divisor));
        }
  return result;
}

inline Reference reference(const std::string& operation, const ai3::ElementwiseProblem& p, const double* x, const double*,
                           const double*, const double*, const double*) {
  using enum ai3::Activation;
  const ai3::Activation function = operation == "relu"   ? relu
                                   : operation == "silu" ? silu
                                   : operation == "gelu" ? (p.form == 1 ? gelu_tanh : gelu)
                                                         : none;
  Reference result{std::vector<double>(p.count), std::vector<double>(p.count)};
  for (int64_t i = 0; i < p.count; i++) {
    result.y[i] = activate(function, x[i], 0);
    result.magnitude[i] = std::fabs(x[i]), result.largest = std::fmax(result.largest, std::fabs(result.y[i]));
  }
  return result;
}

inline Reference reference(const std::string&, const ai3::AttentionProblem& p, const double* q, const double* k, const double* v,
                           const double*, const double*) {
  const int64_t heads = p.outer * p.batch * p.heads, shared = p.heads / p.kv_heads;
  const size_t count = static_cast<size_t>(heads * p.queries * p.value_size);
  Reference result{std::vector<double>(count), std::vector<double>(count)};
  for (int64_t head = 0; head < heads; head++)
    for (int64_t i = 0; i < p.queries; i++) {
      const double* query = q + (head * p.queries + i) * p.size;
      const int64_t keys = p.causal ? std::min(p.keys, i + 1) : p.keys;
      std::vector<double> weights(static_cast<size_t>(keys));
      double most = -INFINITY, total = 0;
      for (int64_t j = 0; j < keys; j++) {
        double score = 0;
        for (int64_t c = 0; c < p.size; c++) score += query[c] * k[(head / shared * p.keys + j) * p.size + c];
        weights[j] = score * p.scale;
        most = std::fmax(most, weights[j]);
      }
      for (double& weight : weights) total += weight = std::exp(weight - most);
      for (int64_t c = 0; c < p.value_size; c++) {
        double sum = 0, magnitude = 0;
        for (int64_t j = 0; j < keys; j++) {
          const double term = weights[j] / total * v[(head / shared * p.keys + j) * p.value_size + c];
          sum += term, magnitude += std::fabs(term);
        }
        const int64_t at = (head * p.queries + i) * p.value_size + c;
        result.y[at] = sum, result.magnitude[at] = magnitude;
        result.largest = std::fmax(result.largest, std::fabs(sum));
      }
    }
  return result;
}
