// The parts of transform_domain.h that depend neither on the transform nor on the type of the tensors: the plan, the products,
// the loops over blocks, and what packs weights.
#include "transform_domain.h"

namespace ai3::inline AI3_LEVEL {

DomainPlan::DomainPlan(const Conv2dProblem& problem, const TransformSizes& transform)
    : p(problem),
      sizes(transform),
      h(p.in_height, p.out_height, p.kernel_height, p.stride_h, p.pad_h, p.dilation_h, sizes.extent_h, sizes.most_taps_h),
      w(p.in_width, p.out_width, p.kernel_width, p.stride_w, p.pad_w, p.dilation_w, sizes.extent_w, sizes.most_taps_w) {
  group_in = p.in_channels / p.groups, group_out = p.out_channels / p.groups;
  panels = ceil_div(group_out, sizes.panel());
  branches = h.branches * w.branches, depth = checked_mul(branches, group_in);
  parts = p.groups == 1 ? 1 : branches;
  tiles = checked_product({p.batch < 1 ? 1 : p.batch, h.tiles, w.tiles});
  const int64_t v_row = checked_mul(branches, p.in_channels);
  const int64_t m_row =
      round_up(p.out_channels, p.groups == 1 ? sizes.panel() : sizes.width());  // with one group whole panels are written
  row = round_up(v_row > m_row ? v_row : m_row, sizes.width());
  plan();
  cached =
      split != Split::phases && p.groups == 1 && checked_product({panels, depth, sizes.panel(), sizes.stored_bytes}) <= 16 << 10;
  stride = checked_add(checked_mul(block, row), sizes.skew());
  packed_stride = checked_add(checked_product({p.groups, panels, depth, sizes.panel()}), sizes.skew());
}

// Blocks of tiles whose transforms fill about a core's cache, shared evenly. With too few tiles for that each thread takes them
// all, for filters of its own: every thread transforms the whole input, which costs less than that cores wait for each other's
// lines (docs/decisions/threads.md). Where there are no filters for all threads, they share the phases one by one, of blocks
// that are bounded only so that the workspace is.
void DomainPlan::plan() {
  const int64_t tile_bytes = checked_product({sizes.positions, row, sizes.sum_bytes});
  auto fitting = [&](int64_t bytes, int64_t most) {
    const int64_t n = bytes / tile_bytes;
    return n < 1 ? 1 : n > most ? most : n;
  };
  // Fewer than two slabs of the micro-kernel would read the weights too often, or four where they come from memory, unless
  // tiles are very large.
  const int64_t weight_bytes = checked_product({sizes.positions, p.groups, panels, depth, sizes.panel(), sizes.stored_bytes});
  const int64_t in_cache = fitting(336 << 10, 56), least = fitting(16 << 20, weight_bytes > 16 << 20 ? 56 : 28),
                small = larger(in_cache, least);
  // A thread with a block of its own reads all weights; one that shares the phases, what the others have written of the tiles,
  // which is some times slower.
  const bool few = tiles < p.threads * (small < 14 ? small : 14), tiny = tiles < p.threads * 8;
  const double read = static_cast<double>(group_in) * static_cast<double>(p.out_channels) * p.threads,
               exchanged = 4. * static_cast<double>(tiles) * static_cast<double>(p.in_channels + p.out_channels);
  // With filters of their own all threads transform the whole input: that must be little beside a thread's products.
  const double transform = 6. * sizes.forward_flops * p.threads,
               products = 2. * sizes.positions * static_cast<double>(panels * sizes.panel());
  const bool divisible = p.threads > 1 && p.groups == 1 && panels >= p.threads && transform <= products &&
                         round_up(panels, p.threads) <= panels + panels / 8;
  // A weight that was packed just now is in the caches of those who packed it: they multiply it where it is the larger operand.
  const bool packed_here = divisible && p.packed_for_call && tiles <= p.out_channels / 4;
  split = p.threads <= 1 || ((!few || (!tiny && read <= exchanged)) && !packed_here) ? Split::tiles
          : divisible                                                                ? Split::filters
                                                                                     : Split::phases;
  shares = split == Split::filters ? p.threads : 1;
  blocks = ceil_div(tiles, split == Split::phases ? fitting(48 << 20, tiles) : small);
  if (split == Split::tiles && p.threads > 1) blocks = round_up(blocks, p.threads);
  block = ceil_div(tiles, blocks), blocks = ceil_div(tiles, block);
}

Cost DomainPlan::cost() const {
  const double n = static_cast<double>(tiles), size = static_cast<double>(size_of(p.dtype));
  return {n * (2. * static_cast<double>(sizes.positions) * static_cast<double>(p.groups * panels * sizes.panel()) *
                   static_cast<double>(depth) +
               sizes.forward_flops * static_cast<double>(branches * p.in_channels) +
               sizes.inverse_flops * static_cast<double>(p.out_channels)),
          size * static_cast<double>(p.batch) *
                  (static_cast<double>(p.in_channels) * static_cast<double>(p.in_height) * static_cast<double>(p.in_width) +
                   static_cast<double>(p.out_channels) * static_cast<double>(p.out_height) * static_cast<double>(p.out_width)) +
              static_cast<double>(sizes.stored_bytes) * static_cast<double>(packed_elements()),
          .85};
}

Vec<double> Taps::gathered(int64_t tap) const {
  Vec<double> value = 0.;
  with_type(dtype, [&]<class T>() {
    const T* at = static_cast<const T*>(weights);
    for (int j = 0; j < Vec<double>::width && lane + j < left; j++) value.raw[j] = widen(at[(lane + j) * apart + tap]);
  });
  return value;
}

template <class A, class Stored>
void pack_domain(const DomainPlan& d, const void* weight, Stored* packed, bool turned, WeightTransform<Stored> transform) {
  const Conv2dProblem& p = d.p;
  constexpr int64_t kStaged = 32, P = kPanel<A>;  // taps that are first brought side by side for a panel's filters
  const int64_t taps = p.kernel_height * p.kernel_width, apart = turned ? taps : d.group_in * taps, depth = d.depth;
  parallel_ranges(p.threads, p.groups * d.panels * depth, 16, [&](int64_t begin, int64_t end, int) {
    alignas(64) A stage[kStaged * P];
    Taps of{p.dtype, {}, {}, p.kernel_width, taps, turned, taps <= kStaged ? stage : nullptr, nullptr, P, apart, 0, 0};
    for (int64_t i = begin; i < end; i++) {
      const int64_t group = i / depth / d.panels, panel = i / depth % d.panels, branch = i % depth / d.group_in,
                    c = i % d.group_in, first = panel * P, left = d.group_out - first;
      const int64_t at =
          (turned ? (group * d.group_in + c) * d.group_out + first : (group * d.group_out + first) * d.group_in + c) * taps;
      of.weights = static_cast<const char*>(weight) + at * size_of(p.dtype), of.left = left;
      for (int64_t e = 0; left < P && e < kStaged * P; e++) stage[e] = 0;
      if (taps <= kStaged)
        with_type(p.dtype, [&]<class T>() {
          if constexpr (std::is_same_v<Acc<T>, A>)
            copy_rows(static_cast<const T*>(of.weights), 1, apart, taps, smaller(left, P), stage, P);
        });
      for (int64_t u = 0; u < d.sizes.extent_h; u++) {
        const int64_t r = d.h.tap(branch / d.w.branches, u);
        of.rows[u] = u < d.h.taps && r < p.kernel_height ? r : -1;
      }
      for (int64_t v = 0; v < d.sizes.extent_w; v++) {
        const int64_t s = d.w.tap(branch % d.w.branches, v);
        of.columns[v] = v < d.w.taps && s < p.kernel_width ? s : -1;
      }
      for (of.lane = 0; of.lane < P; of.lane += Vec<double>::width) transform(of, packed + i * P + of.lane, d.packed_stride);
    }
  });
  for (int64_t position = 1; position <= d.sizes.positions; position++)
    for (int64_t i = 1; i <= d.sizes.skew(); i++) packed[position * d.packed_stride - i] = Stored{};
}

template <class T>
void finish_tile(const TileOutput<T>& to, const Vec<Acc<T>>* tile, int64_t pitch) {
  using A = Acc<T>;
  constexpr int64_t width = Vec<A>::width;
  if (to.step_w != 1 || to.channel_step == 1 || to.residual) {
    for (int64_t i = 0; i < to.rows; i++)
      for (int64_t j = 0; j < to.columns; j++) to.put(i, j, tile[i * pitch + j]);
    return;
  }
  for (int64_t i = 0; i < to.rows; i++)
    for (int64_t j = 0; j < to.columns; j += width) {
      const int64_t columns = smaller(width, to.columns - j);
      Vec<A> square[width];
#pragma GCC unroll 16
      for (int64_t k = 0; k < width; k++)
        square[k] = k < columns ? to.epilogue.partial(tile[i * pitch + j + k] + to.epilogue.bias) : Vec<A>(A{0});
      transpose(square);
      T* y = to.y + i * to.step_h + j;
#pragma GCC unroll 16
      for (int64_t c = 0; c < width; c++, y += to.channel_step)
        if (c < to.epilogue.count) columns == width ? store(y, square[c]) : store_partial(y, square[c], columns);
    }
}

namespace {

// The input of a thread's next block of tiles, prefetched evenly over the turns in which it multiplies this one: in each at
// most one row of the pixels that a tile adds to those of its neighbours. Prefetched all at once they keep the products
// waiting.
struct Ahead {
  const DomainPlan& d;
  int64_t size;  // of an element of x
  const char* x;
  int64_t first, rows, turns;  // tile; rows of pixels of all tiles
  int64_t step;                // bytes for each element of k
  int64_t due = 0, asked = 0;  // due: rows a turn, in turns
  const char* line = nullptr;  // of the tile's first row that is new
  int64_t top = 0;             // its place in the image

  AI3_INLINE Next next() {
    const Next nothing{x, 0};
    due += rows;
    if (due < turns || asked == rows) return nothing;
    due -= turns;
    const int64_t r = asked % d.h.tile, t = first + asked / d.h.tile;
    asked++;
    if (r == 0) {
      top = d.h.first_input(d.h.first_output(t / d.w.tiles % d.h.tiles), 0) + d.h.taps - 1;  // below its neighbour's
      line = x + size * (t / (d.w.tiles * d.h.tiles) * d.p.x_stride.n + top * d.p.x_stride.h +
                         larger(0, d.w.first_input(d.w.first_output(t % d.w.tiles), 0)) * d.p.x_stride.w);
    }
    if (top + r < 0 || top + r >= d.p.in_height) return nothing;
    return {line + size * r * d.p.x_stride.h, step};
  }
};
// For n tiles from `first` on; none where a row of a tile's pixels is no run of memory, or too long for a turn, which
// prefetches two lines with each element of k.
Ahead ahead_of(const DomainPlan& d, const void* x, int64_t first, int64_t n, int64_t tiles_now) {
  const Conv2dProblem& p = d.p;
  const int64_t size = size_of(p.dtype), slabs = ceil_div(tiles_now, kRows),
                turns = d.sizes.positions * p.groups * ceil_div(d.panels, d.shares) * d.parts * (d.cached ? slabs : slabs - 1);
  const int64_t step = d.w.tile * p.in_channels * size * d.parts / d.depth;
  const bool runs = p.x_stride.c == 1 && p.x_stride.w == p.in_channels && d.h.spacing == 1 && d.w.spacing == 1 && step <= 128;
  return {d, size, static_cast<const char*>(x), first, n > 0 && runs ? n * d.h.tile : 0, larger(1, turns), step};
}

template <class A, class Stored>
struct Products {
  const DomainPlan& d;
  static constexpr int64_t P = kPanel<A>, kSkew = 64 / static_cast<int64_t>(sizeof(A));

  // `count` rows times a panel.
  AI3_INLINE void product(const StridedRows<A>& rows, int64_t count, const Stored* panel, int64_t k, A* to, Next next) const {
    multiply_tile<A, true>(
        count, rows, panel, k,
        Tile<A>{zeros<A>(), to, d.row, reinterpret_cast<const char*>(to), d.row * static_cast<int64_t>(sizeof(A)), next});
  }
  // One panel of the products of one position, `rows` tiles; `index` counts the panels `own`.
  [[gnu::noinline]] void multiply(const A* v, const Stored* packed, A* m, int64_t rows, int64_t index, const Share& own,
                                  Ahead& ahead) const {
    const int64_t count = own.end - own.begin, panel = own.begin + index % count, group = index / count % d.p.groups,
                  position = index / count / d.p.groups;
    const int64_t column = group * d.group_out + index % count * P, left = d.group_out - panel * P;
    const int64_t columns = d.p.groups == 1 || left > P ? P : left;
    const Stored* panel_at = packed + position * d.packed_stride + (group * d.panels + panel) * d.depth * P;
    Output<A> out{m + position * d.stride + column, d.row};
    constexpr int64_t kSpread = 16;
    const int64_t length = d.depth / d.parts, slabs = ceil_div(rows, kRows), bytes = P * static_cast<int64_t>(sizeof(Stored));
    for (int64_t part = 0; part < d.parts; part++, out.add = true, panel_at += length * P) {
      const StridedRows<A> from{v + position * d.stride + part * d.p.in_channels + group * d.group_in, d.row};
      // The panel behind this one is multiplied next: it is prefetched over all slabs or, where other turns are for the input,
      // one.
      const int64_t others = panel + 1 == own.end && part + 1 == d.parts ? (d.panels - count) * d.depth * P + kSkew : 0;
      const char* panel_next = reinterpret_cast<const char*>(panel_at + length * P + others);
      const int64_t turns = ahead.rows > 0 ? 1 : smaller(slabs, kSpread), step = bytes / turns;
      for (int64_t s = 0; s < slabs; s++) {
        const Share r = share(rows, slabs, s);
        const Next next = s < turns ? Next{panel_next + s * step * length, step} : ahead.next();
        if (columns == P && !out.add)
          product(from.from(r.begin), r.end - r.begin, panel_at, length, out.data + r.begin * d.row, next);
        else
          multiply_slab<A>(from.from(r.begin), r.end - r.begin, panel_at, columns, length, out.from(r.begin, 0), next);
      }
    }
  }
  // The panels `own` of a position, where they stay in the L1 cache.
  [[gnu::noinline]] void multiply_cached(const A* v, const Stored* packed, A* m, int64_t rows, int64_t position, const Share& own,
                                         Ahead& ahead) const {
    const Stored* at = packed + position * d.packed_stride + own.begin * d.depth * P;
    const int64_t slabs = ceil_div(rows, kRows);
    for (int64_t s = 0; s < slabs; s++) {
      const Share r = share(rows, slabs, s);
      const int64_t first = position * d.stride + r.begin * d.row;
      for (int64_t q = 0; q < own.end - own.begin; q++)
        product({v + first, d.row}, r.end - r.begin, at + q * d.depth * P, d.depth, m + first + q * P, ahead.next());
    }
  }
};

}  // namespace

template <class A, class Stored>
void run_domain(const DomainPlan& d, const Phases& phases, const Conv2dOperands& operands, bool streaming, Workspace& workspace) {
  constexpr int64_t kWidth = Vec<A>::width;
  const Conv2dProblem& p = d.p;
  const Products<A, Stored> multiplication{d};
  const int64_t tiles = d.tiles, block = d.block, blocks = d.blocks, panels = d.panels, positions = d.sizes.positions;
  const void* const x = operands.input.data;
  const Stored* packed = operands.weight.read<Stored>();
  A* const buffer = workspace.take<A>(d.copies() * d.block_elements());
  // Vectors multiplied, or as much work: of a vector of a tile's input channels, of a panel of a position for n tiles, of a
  // vector of a tile's output channels.
  const double forward_size = d.sizes.forward_flops / 2 * static_cast<double>(d.branches),
               inverse_size = d.sizes.inverse_flops / 2;
  auto panel_size = [&](int64_t n) { return 2. * static_cast<double>(n * d.depth); };
  // body(tile, first, last) for the vectors of channels [begin, end), counted through the tiles of a block.
  auto by_tiles = [](int64_t begin, int64_t end, int64_t channels, const auto& body) {
    const int64_t vectors = ceil_div(channels, kWidth);
    for (int64_t tile = begin / vectors; tile * vectors < end; tile++)
      body(tile, larger(0, begin - tile * vectors) * kWidth, smaller(channels, (end - tile * vectors) * kWidth));
  };
  // The filters of the panels `own`; `later`: the first tile that this thread takes next.
  auto take_block = [&](int64_t b, int64_t later, int64_t copy, const Share& own, const auto& ranges) {
    A *m = buffer + copy * d.block_elements(), *v = m + d.v_offset();
    const int64_t first = b * block, n = smaller(block, tiles - first), channel = own.begin * kPanel<A>,
                  channels = own.end == panels ? p.out_channels - channel : own.end * kPanel<A> - channel;
    auto forward = [&](int64_t begin, int64_t end) {
      by_tiles(begin, end, p.in_channels,
               [&](int64_t i, int64_t c, int64_t last) { phases.input(d, x, v, first + i, i, c, last); });
    };
    ranges(n * ceil_div(p.in_channels, kWidth), forward, forward_size);
    auto products = [&](int64_t begin, int64_t end) {
      Ahead ahead = ahead_of(d, x, later, smaller(block, tiles - later), n);
      for (int64_t i = begin; i < end; i++)
        d.cached ? multiplication.multiply_cached(v, packed, m, n, i, own, ahead)
                 : multiplication.multiply(v, packed, m, n, i, own, ahead);
    };
    ranges(positions * (d.cached ? 1 : p.groups * (own.end - own.begin)), products, panel_size(n));
    auto inverse = [&](int64_t begin, int64_t end) {
      by_tiles(begin, end, channels, [&](int64_t i, int64_t k, int64_t last) {
        phases.output(d, m, operands, first + i, i, channel, channel + k, channel + last, streaming);
      });
      if (streaming) finish_streaming();
    };
    ranges(n * ceil_div(channels, kWidth), inverse, inverse_size);
  };
  const Share all{0, panels};
  auto alone = [](int64_t count, const auto& body, double) { body(0, count); };
  auto together = [&](int64_t count, const auto& body, double size) {
    parallel_ranges(
        p.threads, count, 1, [&](int64_t begin, int64_t end, int) { body(begin, end); }, size);
  };
  // Of n tiles with the filters of some panels.
  auto size_of_tiles = [&](int64_t n, const Share& own) {
    const double filters = static_cast<double>(own.end - own.begin);
    return static_cast<double>(n * ceil_div(p.in_channels, kWidth)) * forward_size +
           static_cast<double>(positions * p.groups) * filters * panel_size(n) +
           static_cast<double>(n * p.groups) * 2 * filters * inverse_size;
  };
  if (d.split == Split::tiles) {
    auto task = [&](int64_t b, int thread) {
      const Share mine = share(blocks, team_of(p.threads, blocks), thread);
      take_block(b, b >= mine.begin && b + 1 < mine.end ? (b + 1) * block : tiles, thread, all, alone);
    };
    parallel_for(p.threads, blocks, task, [&](int64_t b) { return size_of_tiles(smaller(block, tiles - b * block), all); });
  } else if (d.split == Split::filters) {
    auto task = [&](int64_t i, int) {
      for (int64_t b = 0; b < blocks; b++) take_block(b, (b + 1) * block, i, share(panels, d.shares, i), alone);
    };
    parallel_for(p.threads, d.shares, task, [&](int64_t i) { return size_of_tiles(tiles, share(panels, d.shares, i)); });
  } else
    for (int64_t b = 0; b < blocks; b++) take_block(b, tiles, 0, all, together);
}

#define AI3_DOMAIN_OF_(A, Stored)                                                                               \
  template void pack_domain<A, Stored>(const DomainPlan&, const void*, Stored*, bool, WeightTransform<Stored>); \
  template void run_domain<A, Stored>(const DomainPlan&, const Phases&, const Conv2dOperands&, bool, Workspace&);
AI3_DOMAIN_OF_(float, float)
AI3_DOMAIN_OF_(float, bfloat16)
template void finish_tile<float>(const TileOutput<float>&, const Vec<float>*, int64_t);
#ifndef AI3_ONLY_FLOAT32
AI3_DOMAIN_OF_(double, double)
template void finish_tile<double>(const TileOutput<double>&, const Vec<double>*, int64_t);
template void finish_tile<bfloat16>(const TileOutput<bfloat16>&, const Vec<float>*, int64_t);
template void finish_tile<float16>(const TileOutput<float16>&, const Vec<float>*, int64_t);
#endif

}  // namespace ai3::inline AI3_LEVEL
