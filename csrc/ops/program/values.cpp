#include "values.h"

#include <numeric>
#include <stdexcept>

#include "../../algos/core/checked.h"
#include "../tensor/layout.h"

namespace ai3::ops::program {

Sizes natural_order(size_t rank) {
  Sizes order(rank);
  std::iota(order.begin(), order.end(), 0);
  return order;
}
Sizes image_order() { return {0, 2, 3, 1}; }
Sizes dense_strides(const Sizes& sizes, const Sizes& order) {
  Sizes strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = order.size(); i-- > 0;) {
    const auto d = static_cast<size_t>(order[i]);
    strides[d] = stride;
    stride = checked_mul(stride, sizes[d]);
  }
  return strides;
}
bool same_order(const Sizes& sizes, const Sizes& a, const Sizes& b) {
  auto wide = [&](const Sizes& order) {
    Sizes dims;
    for (const int64_t d : order)
      if (sizes[static_cast<size_t>(d)] != 1) dims.push_back(d);
    return dims;
  };
  return wide(a) == wide(b);
}
int64_t count_of(const Sizes& sizes) {
  int64_t count = 1;
  for (const int64_t size : sizes) count = checked_mul(count, size);
  return count;
}
std::optional<int64_t> rows_apart(const Sizes& sizes, const Sizes& strides, const Sizes& order) {
  const auto inner = static_cast<size_t>(order.back());
  if (sizes[inner] != 1 && strides[inner] != 1) return std::nullopt;
  int64_t apart = sizes[inner], rows = 1;
  for (size_t i = order.size() - 1; i-- > 0;) {
    const auto d = static_cast<size_t>(order[i]);
    if (sizes[d] == 1) continue;
    if (rows == 1) apart = strides[d];
    if (strides[d] != rows * apart) return std::nullopt;
    rows *= sizes[d];
  }
  return apart >= sizes[inner] ? std::optional(apart) : std::nullopt;
}
std::optional<Sizes> reshaped(const Sizes& sizes, const Sizes& strides, const Sizes& to) {
  if (count_of(to) == 0) return dense_strides(to, natural_order(to.size()));
  // Dimensions that lie in one another are one; each is then cut into those of `to`.
  std::vector<std::pair<int64_t, int64_t>> runs;  // size, stride
  for (size_t d = 0; d < sizes.size(); d++) {
    if (sizes[d] == 1) continue;
    if (!runs.empty() && runs.back().second == strides[d] * sizes[d])
      runs.back() = {runs.back().first * sizes[d], strides[d]};
    else
      runs.emplace_back(sizes[d], strides[d]);
  }
  Sizes result(to.size(), 1);
  size_t run = runs.size();
  int64_t left = 1, stride = 1;
  for (size_t d = to.size(); d-- > 0;) {
    if (to[d] == 1) continue;
    if (left == 1) {
      if (run-- == 0) return std::nullopt;
      left = runs[run].first, stride = runs[run].second;
    }
    if (left % to[d] != 0) return std::nullopt;
    result[d] = stride, stride *= to[d], left /= to[d];
  }
  return result;
}

int Values::add(Sizes sizes, DType dtype, Sizes order) {
  Value v{};
  v.dtype = dtype, v.strides = dense_strides(sizes, order), v.order = std::move(order), v.sizes = std::move(sizes);
  if (checked_mul(count_of(v.sizes), size_of(dtype)) == kOverflow)
    throw std::runtime_error("a tensor of sizes " + to_string(v.sizes) + " is too large");
  all_.push_back(std::move(v));
  return count() - 1;
}
int Values::add_view(int of, Sizes sizes, Position position) {
  const int value = add(std::move(sizes), at(of).dtype, natural_order(position.strides.size()));
  Value& v = at(value);
  v.parent = position.root, v.view = true, v.offset = position.offset, v.strides = std::move(position.strides);
  return value;
}
Position Values::position(int value) const {
  const Value& v = at(value);
  if (v.parent < 0) return {value, 0, v.strides};
  if (v.view) {
    Position p = position(v.parent);
    return {p.root, p.offset + v.offset, v.strides};
  }
  Position p = position(v.parent);
  p.offset += v.start * p.strides[static_cast<size_t>(v.dim)];
  return p;
}
bool Values::is_dense(int value, const Sizes& order) const {
  const Value& v = at(value);
  const Sizes strides = position(value).strides, wanted = dense_strides(v.sizes, order);
  for (size_t d = 0; d < strides.size(); d++)
    if (v.sizes[d] != 1 && strides[d] != wanted[d]) return false;
  return true;
}

}  // namespace ai3::ops::program
