// Matrix tiles: Intel AMX's eight registers of up to 16 rows of 64 bytes. One instruction multiplies 16 rows of 16 pairs of
// bfloat16 by a matrix of 16 x 16 pairs and adds the sums to a tile of float32: per cycle eight times the products that
// AVX512-BF16 has. Pairs lie in panels as PairRows (micro_kernel.h) has them; subnormal numbers count as 0, as there.
#pragma once
#include "amx.h"
#include "lanes.h"

namespace ai3::inline AI3_LEVEL {

// Whether products of pairs go through tiles; level avx512 does not imply it.
AI3_INLINE bool has_matrix_tiles() { return AI3_VECTOR_BYTES == 64 && uses_matrix_tiles(); }

inline constexpr int64_t kTileRows = 16, kTilePairs = 16, kTileBytes = 64;
// Rows of a slab and columns of a panel: two tiles of each, so that every tile that is loaded is multiplied twice.
inline constexpr int64_t kSlabRows = 2 * kTileRows, kSlabColumns = 32;

// Tiles 0 to 3 are sums, [two of rows][two of columns], 4 and 5 those of rows, 6 and 7 of columns.
namespace amx {

// The registers' shapes for a slab and a step of so many pairs.
struct Shapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  AI3_INLINE Shapes(int64_t slab_rows, int64_t pairs) {
    for (int i = 0; i < 2; i++) {
      const int64_t part = smaller(kTileRows, larger(0, slab_rows - i * kTileRows));
      set(2 * i, part, kTileBytes), set(2 * i + 1, part, kTileBytes);
      set(4 + i, part, pairs * 4), set(6 + i, pairs, kTileBytes);
    }
  }
  AI3_INLINE void set(int which, int64_t count, int64_t bytes) {
    rows[which] = static_cast<uint8_t>(count), row_bytes[which] = static_cast<uint16_t>(count > 0 ? bytes : 0);
  }
};
static_assert(sizeof(Shapes) == 64);

// As assembly: the compiler need not know the registers, which nothing else uses. Sets all of them to zero.
AI3_INLINE void configure([[maybe_unused]] const Shapes& shapes) {
#if AI3_VECTOR_BYTES == 64
  asm volatile("ldtilecfg %0" ::"m"(shapes));
#endif
}
// Nothing is kept of the registers, which the system would save at each change of threads.
AI3_INLINE void release() {
#if AI3_VECTOR_BYTES == 64
  asm volatile("tilerelease");
#endif
}
template <int to>
AI3_INLINE void load([[maybe_unused]] const void* data, [[maybe_unused]] int64_t row_bytes) {
#if AI3_VECTOR_BYTES == 64
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(data), "r"(row_bytes), "i"(to) : "memory");
#endif
}
template <int from>
AI3_INLINE void store([[maybe_unused]] void* data, [[maybe_unused]] int64_t row_bytes) {
#if AI3_VECTOR_BYTES == 64
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(data), "r"(row_bytes), "i"(from) : "memory");
#endif
}
template <int sums, int rows, int columns>
AI3_INLINE void add_products() {
#if AI3_VECTOR_BYTES == 64
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(rows), "i"(columns));
#endif
}
}  // namespace amx

// Whether so many rows of so many pairs go through tiles: with less, vectors are faster.
AI3_INLINE bool fills_tiles(int64_t rows, int64_t pairs) {
  constexpr int64_t kFewRows = 4, kFewPairs = 4;
  return has_matrix_tiles() && rows > kFewRows && pairs >= kFewPairs;
}

// How pairs are cut into steps: `count` of `step` pairs, and one of the `rest`, which needs other shapes. So none is left where
// the pairs have a divisor of at least half a tile.
struct TileSteps {
  int64_t step, count, rest;
  AI3_INLINE explicit TileSteps(int64_t pairs) : step(smaller(kTilePairs, pairs)) {
    while (pairs % step && step > kTilePairs / 2) step--;
    if (pairs % step) step = kTilePairs;
    count = pairs / step, rest = pairs % step;
  }
};

// sums[row_count][kSlabColumns] = start + rows * panel, for shapes that are configured; of 16 columns or less only the left half
// of the sums is written. Rows of `start` lie `start_stride` apart, 0 where they are one. Meanwhile `ahead` bytes from `next` on
// come into the L2 cache in each step.
AI3_INLINE void multiply_tiles(int64_t row_count, int64_t columns, const char* rows, int64_t row_bytes, const float* panel,
                               int64_t steps, int64_t step, const float* start, int64_t start_stride, float* sums,
                               const char* next, int64_t ahead) {
  constexpr int64_t kFloat = sizeof(float), kRowBytes = kSlabColumns * kFloat, kHalf = kSlabColumns / 2;
  auto multiply = [&]<bool two_rows, bool two_columns>() {
    amx::load<0>(start, start_stride * kFloat);
    if constexpr (two_columns) amx::load<1>(start + kHalf, start_stride * kFloat);
    if constexpr (two_rows) amx::load<2>(start + kTileRows * start_stride, start_stride * kFloat);
    if constexpr (two_rows && two_columns) amx::load<3>(start + kTileRows * start_stride + kHalf, start_stride * kFloat);
    for (int64_t i = 0; i < steps; i++, rows += step * 4, panel += step * kSlabColumns, next += ahead) {
      for (int64_t line = 0; line < ahead; line += 64) __builtin_prefetch(next + line, 0, 2);
      amx::load<4>(rows, row_bytes), amx::load<6>(panel, kRowBytes);
      amx::add_products<0, 4, 6>();
      if constexpr (two_columns) amx::load<7>(panel + kHalf, kRowBytes), amx::add_products<1, 4, 7>();
      if constexpr (two_rows) amx::load<5>(rows + kTileRows * row_bytes, row_bytes), amx::add_products<2, 5, 6>();
      if constexpr (two_rows && two_columns) amx::add_products<3, 5, 7>();
    }
    amx::store<0>(sums, kRowBytes);
    if constexpr (two_columns) amx::store<1>(sums + kHalf, kRowBytes);
    if constexpr (two_rows) amx::store<2>(sums + kTileRows * kSlabColumns, kRowBytes);
    if constexpr (two_rows && two_columns) amx::store<3>(sums + kTileRows * kSlabColumns + kHalf, kRowBytes);
  };
  if (columns > kHalf)
    row_count > kTileRows ? multiply.template operator()<true, true>() : multiply.template operator()<false, true>();
  else
    row_count > kTileRows ? multiply.template operator()<true, false>() : multiply.template operator()<false, false>();
}

}  // namespace ai3::inline AI3_LEVEL
