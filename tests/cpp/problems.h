// Small problems that reach every branch: remainders of vectors and tiles, edges, strides, dilations, groups.
#pragma once
#include <cmath>
#include <sstream>
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

namespace problems {

// In both layouts. Shapes as batch, in_channels, height, width, out_channels, kernel, stride, pad, dilation, groups.
struct Conv {
  int64_t n, c, h, w, k, r, s, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, groups;
};
inline ai3::Strides4 strides(bool nhwc, int64_t c, int64_t h, int64_t w) {
  return nhwc ? ai3::Strides4{c * h * w, 1, w * c, c} : ai3::Strides4{c * h * w, h * w, w, 1};
}
inline ai3::Conv2dProblem conv2d(const Conv& v, bool nhwc, bool bias) {
  ai3::Conv2dProblem p{};
  p.dtype = ai3::DType::f32, p.threads = 1;
  p.batch = v.n, p.in_channels = v.c, p.in_height = v.h, p.in_width = v.w, p.out_channels = v.k;
  p.kernel_height = v.r, p.kernel_width = v.s, p.stride_h = v.stride_h, p.stride_w = v.stride_w;
  p.pad_h = v.pad_h, p.pad_w = v.pad_w, p.dilation_h = v.dilation_h, p.dilation_w = v.dilation_w, p.groups = v.groups;
  p.out_height = (v.h + 2 * v.pad_h - v.dilation_h * (v.r - 1) - 1) / v.stride_h + 1;
  p.out_width = (v.w + 2 * v.pad_w - v.dilation_w * (v.s - 1) - 1) / v.stride_w + 1;
  p.has_bias = bias;
  p.x_stride = strides(nhwc, v.c, v.h, v.w);
  p.y_stride = strides(nhwc, v.k, p.out_height, p.out_width);
  return p;
}
// A 3x3 convolution with stride 1 and the given padding.
inline Conv conv3x3(int64_t n, int64_t c, int64_t h, int64_t w, int64_t k, int64_t pad, int64_t groups = 1) {
  return {n, c, h, w, k, 3, 3, 1, 1, pad, pad, 1, 1, groups};
}
inline std::vector<ai3::Conv2dProblem> all(ai3::Conv2dProblem*, const std::string&) {
  const Conv cases[] = {
      conv3x3(1, 3, 5, 7, 4, 1),
      conv3x3(2, 33, 13, 14, 37, 1),
      conv3x3(1, 48, 9, 8, 20, 0),
      conv3x3(1, 20, 9, 10, 96, 1),
      conv3x3(1, 4, 24, 24, 192, 1),
      conv3x3(1, 5, 20, 21, 32, 1),
      conv3x3(1, 64, 17, 16, 32, 1),
      {1, 3, 6, 9, 32, 3, 3, 1, 1, 1, 4, 1, 1, 1},
      conv3x3(1, 2, 3, 3, 2, 4),
      conv3x3(3, 5, 1, 1, 7, 1),
      conv3x3(2, 4, 8, 8, 6, 1, 2),
      conv3x3(1, 34, 6, 7, 38, 1, 2),
      conv3x3(1, 6, 7, 9, 12, 1, 6),
      conv3x3(1, 19, 12, 5, 19, 1, 19),
      {2, 5, 9, 6, 7, 3, 3, 2, 2, 0, 1, 1, 1, 1},
      {1, 20, 11, 10, 20, 5, 5, 2, 2, 2, 2, 2, 2, 20},
      {1, 6, 10, 10, 9, 3, 3, 1, 1, 2, 2, 2, 2, 3},
      {2, 17, 5, 5, 19, 1, 1, 1, 1, 0, 0, 1, 1, 1},
      {1, 300, 4, 5, 20, 1, 1, 1, 1, 0, 0, 1, 1, 1},
      {1, 7, 6, 6, 5, 1, 1, 2, 2, 1, 1, 1, 1, 1},
      {1, 300, 4, 5, 9, 3, 3, 1, 1, 1, 1, 1, 1, 1},
      {1, 40, 17, 18, 5, 3, 3, 1, 1, 1, 1, 1, 1, 1},
      {1, 5, 11, 8, 3, 1, 7, 1, 1, 0, 3, 1, 1, 1},
      {1, 5, 8, 11, 3, 7, 1, 1, 1, 3, 0, 1, 1, 1},
      {1, 2, 9, 9, 3, 2, 2, 3, 3, 0, 0, 1, 1, 1},
      {1, 3, 27, 23, 9, 11, 11, 4, 4, 2, 2, 1, 1, 1},
      {2, 4, 5, 6, 3, 5, 6, 1, 1, 0, 0, 1, 1, 1},
      {1, 8, 12, 13, 8, 5, 5, 1, 1, 2, 2, 1, 1, 1},
      {1, 3, 10, 9, 5, 3, 2, 1, 2, 1, 0, 2, 3, 1},
      // patches that follow one another, and lines that take long tiles
      {2, 5, 9, 11, 7, 3, 2, 3, 2, 0, 0, 1, 1, 1},
      {1, 3, 8, 8, 19, 4, 4, 4, 4, 0, 0, 1, 1, 1},
      {1, 6, 5, 6, 8, 2, 3, 2, 3, 0, 0, 1, 1, 2},
      {1, 3, 2, 130, 5, 1, 40, 1, 1, 0, 20, 1, 1, 1},
      {1, 4, 1, 150, 3, 1, 19, 1, 2, 0, 9, 1, 3, 1},
      {2, 16, 3, 40, 32, 1, 7, 1, 1, 0, 3, 2, 1, 1},
      // groups that fill vectors
      conv3x3(2, 32, 9, 16, 32, 1, 8),
      conv3x3(1, 64, 6, 18, 64, 0, 4),
      {1, 32, 9, 17, 32, 3, 3, 2, 1, 2, 1, 1, 2, 4},
      {1, 16, 5, 9, 16, 1, 2, 1, 1, 0, 1, 1, 1, 8},
      {2, 32, 3, 5, 32, 1, 1, 1, 1, 0, 0, 1, 1, 8},
      // the last vector of them not
      conv3x3(1, 40, 5, 9, 40, 1, 5),
      {2, 24, 6, 33, 24, 3, 3, 2, 2, 1, 2, 1, 1, 6},
      // products in parts of k
      {1, 300, 4, 5, 70, 3, 3, 1, 1, 1, 1, 1, 1, 1},
      {1, 1100, 4, 5, 70, 1, 1, 1, 1, 0, 0, 1, 1, 1},
  };
  std::vector<ai3::Conv2dProblem> result;
  for (const Conv& c : cases)
    for (bool nhwc : {false, true}) {
      result.push_back(conv2d(c, nhwc, (c.c + c.h) % 2 == 0));
      result.back().packed_for_call = c.k > 100;
    }
  return result;
}

inline std::vector<ai3::LinearProblem> all(ai3::LinearProblem*, const std::string&) {
  std::vector<ai3::LinearProblem> result;
  const int64_t cases[][3] = {{1, 5, 3},   {1, 300, 67}, {7, 33, 17}, {50, 19, 41},
                              {3, 600, 5}, {29, 64, 64}, {2, 1, 1},   {67, 24, 4}};
  for (const auto& c : cases) {
    ai3::LinearProblem p{};
    p.dtype = ai3::DType::f32, p.threads = 1, p.rows = c[0], p.in_features = c[1], p.out_features = c[2],
    p.has_bias = c[1] % 2 != 0;
    result.push_back(ai3::with_dense_rows(p));
  }
  return result;
}

inline std::vector<ai3::Pool2dProblem> all(ai3::Pool2dProblem*, const std::string& operation) {
  std::vector<ai3::Pool2dProblem> result;
  auto add = [&](ai3::Pool2dProblem p) {
    for (bool nhwc : {false, true}) {
      p.x_stride = strides(nhwc, p.channels, p.in_height, p.in_width);
      p.y_stride = strides(nhwc, p.channels, p.out_height, p.out_width);
      result.push_back(p);
    }
  };
  ai3::Pool2dProblem p{};
  p.dtype = ai3::DType::f32, p.threads = 1, p.batch = 2, p.kernel_height = p.kernel_width = p.stride_h = p.stride_w = 1;
  p.dilation_h = p.dilation_w = 1;
  if (operation == "adaptive_avg_pool2d") {
    const int64_t cases[][5] = {{3, 7, 7, 1, 1},   {19, 10, 7, 3, 5},  {5, 3, 2, 5, 7},       {1, 4, 4, 4, 4},
                                {150, 6, 5, 1, 1}, {24, 40, 37, 5, 7}, {20, 13, 130, 13, 100}};
    for (const auto& c : cases) {
      p.channels = c[0], p.in_height = c[1], p.in_width = c[2], p.out_height = c[3], p.out_width = c[4];
      add(p);
    }
    return result;
  }
  // channels, height, width, kernel, stride, pad, dilation (of max_pool2d), ceil_mode
  const int64_t cases[][8] = {{3, 8, 8, 2, 2, 0, 1, 0},
                              {19, 9, 7, 3, 2, 1, 1, 0},
                              {2, 10, 11, 3, 2, 0, 1, 1},
                              {5, 7, 9, 2, 3, 1, 2, 1},
                              {70, 4, 5, 3, 1, 1, 1, 0},
                              // of several tiles by rows, by columns, and with windows too large for any
                              {24, 40, 37, 3, 2, 1, 1, 0},
                              {9, 33, 140, 5, 1, 2, 2, 1},
                              {17, 20, 20, 9, 9, 0, 1, 0}};
  for (const auto& c : cases) {
    p.channels = c[0], p.in_height = c[1], p.in_width = c[2], p.kernel_height = p.kernel_width = c[3],
    p.stride_h = p.stride_w = c[4];
    p.pad_h = p.pad_w = c[5], p.dilation_h = p.dilation_w = operation == "max_pool2d" ? c[6] : 1, p.ceil_mode = c[7];
    auto out = [&](int64_t in) {
      const int64_t room = in + 2 * p.pad_h - p.dilation_h * (p.kernel_height - 1) - 1;
      const int64_t n = (room + (p.ceil_mode ? p.stride_h - 1 : 0)) / p.stride_h + 1;
      return p.ceil_mode && (n - 1) * p.stride_h >= in + p.pad_h ? n - 1 : n;  // the last window starts inside the input
    };
    p.out_height = out(p.in_height), p.out_width = out(p.in_width);
    p.count_include_pad = false, p.divisor = 0;
    add(p);
    if (operation == "avg_pool2d") {
      p.count_include_pad = true;
      add(p);
      p.divisor = 3;
      add(p);
    }
  }
  return result;
}

inline std::vector<ai3::ElementwiseProblem> all(ai3::ElementwiseProblem*, const std::string&) {
  std::vector<ai3::ElementwiseProblem> result;
  for (int64_t count : {1, 5, 16, 100, 1000})
    for (int32_t form : {0, 1}) result.push_back(ai3::contiguous_elements(ai3::DType::f32, 1, count, form));
  return result;
}

struct Attention {
  int64_t batch, heads, kv_heads, queries, keys, size, value_size;
  bool causal;
};
inline ai3::AttentionProblem attention(const Attention& c) {
  auto rows = [&](int64_t heads, int64_t count, int64_t size) {
    return ai3::AttentionStrides{c.batch * heads * count * size, heads * count * size, count * size, size};
  };
  ai3::AttentionProblem p{};
  p.dtype = ai3::DType::f32, p.threads = 1, p.outer = 1, p.batch = c.batch, p.heads = c.heads, p.kv_heads = c.kv_heads;
  p.queries = c.queries, p.keys = c.keys, p.size = c.size, p.value_size = c.value_size, p.causal = c.causal;
  p.scale = 1 / std::sqrt(static_cast<double>(c.size)), p.window_left = p.window_right = -1;
  p.query_at = rows(c.heads, c.queries, c.size), p.key_at = rows(c.kv_heads, c.keys, c.size);
  p.value_at = rows(c.kv_heads, c.keys, c.value_size), p.output_at = rows(c.heads, c.queries, c.value_size);
  return p;
}
inline std::vector<ai3::AttentionProblem> all(ai3::AttentionProblem*, const std::string&) {
  std::vector<ai3::AttentionProblem> result;
  for (const Attention& c : {Attention{1, 1, 1, 1, 1, 1, 1, false},
                             {2, 3, 3, 5, 7, 8, 8, false},
                             {1, 2, 1, 33, 129, 17, 5, false},
                             {1, 4, 2, 70, 70, 64, 64, true},
                             {1, 2, 2, 1, 1030, 64, 64, false},
                             {2, 1, 1, 130, 260, 20, 33, true}})
    result.push_back(attention(c));
  return result;
}

inline std::string describe(const ai3::AttentionProblem& p) {
  std::ostringstream s;
  s << "N" << p.batch << "_H" << p.heads << "/" << p.kv_heads << "_L" << p.queries << "_S" << p.keys << "_E" << p.size << "_Ev"
    << p.value_size << (p.causal ? " causal" : "");
  return s.str();
}
inline std::string describe(const ai3::Conv2dProblem& p) {
  std::ostringstream s;
  s << "N" << p.batch << "_C" << p.in_channels << "_H" << p.in_height << "_W" << p.in_width << "_K" << p.out_channels << "_k"
    << p.kernel_height << "x" << p.kernel_width << "s" << p.stride_h << "x" << p.stride_w << "p" << p.pad_h << "x" << p.pad_w
    << "d" << p.dilation_h << "x" << p.dilation_w << "g" << p.groups << (p.x_stride.c == 1 ? " nhwc" : " nchw")
    << (p.has_bias ? " bias" : "");
  return s.str();
}
inline std::string describe(const ai3::LinearProblem& p) {
  return "M" + std::to_string(p.rows) + "_K" + std::to_string(p.in_features) + "_N" + std::to_string(p.out_features) +
         (p.has_bias ? " bias" : "");
}
inline std::string describe(const ai3::Pool2dProblem& p) {
  std::ostringstream s;
  s << "N" << p.batch << "_C" << p.channels << "_H" << p.in_height << "_W" << p.in_width << "_o" << p.out_height << "x"
    << p.out_width << "_k" << p.kernel_height << "s" << p.stride_h << "p" << p.pad_h << "d" << p.dilation_h
    << (p.ceil_mode ? " ceil" : "") << (p.count_include_pad ? " include_pad" : "") << " divisor " << p.divisor
    << (p.x_stride.c == 1 ? " nhwc" : " nchw");
  return s.str();
}
inline std::string describe(const ai3::ElementwiseProblem& p) { return std::to_string(p.count) + " elements"; }

}  // namespace problems
