// Steps that compute element by element: activations, sums and products of values, scale and shift of each channel.
#include "../../algos/program/kernels.h"
#include "../prepare/passes.h"
#include "step.h"

namespace ai3::ops::program {
namespace {

void run_map(const void* call, const Operand* m, Workspace&) {
  passes().map(*static_cast<const MapProblem*>(call), *reinterpret_cast<const MapOperands*>(m));
}

template <MapKind kind>
struct MapStep final : Step {
  static constexpr bool binary = kind == MapKind::add || kind == MapKind::multiply;
  MapProblem p{};

  explicit MapStep(Reader& r) {
    r.needs_operands(binary ? 2 : 1);
    const Value x = r.operand(0);
    const bool image = x.sizes.size() == 4;
    p.dtype = x.dtype, p.threads = threads(), p.kind = kind;
    Sizes order = x.order;
    if (binary) {
      const Value& z = r.operand(1);
      p.z_per_image = z.sizes != x.sizes;
      const bool fits = !p.z_per_image || (image && z.sizes == Sizes{x.sizes[0], x.sizes[1], 1, 1});
      r.line.check(fits && z.dtype == x.dtype, "needs values of the same sizes, or a second one (N, C, 1, 1), got " +
                                                   to_string(x.sizes) + " and " + to_string(z.sizes));
    }
    // What differs by channel needs those innermost.
    const bool by_channel = kind == MapKind::affine || p.z_per_image || r.line.has("slope");
    if (by_channel) order = image ? image_order() : natural_order(x.sizes.size());
    const int64_t channels = x.sizes[static_cast<size_t>(order.back())];
    p.function = r.activation(x.dtype, channels);
    // What is innermost may be dimension 0: images count where one value serves all rows of one, whose channels are innermost.
    p.channels = channels, p.images = p.z_per_image ? x.sizes[0] : 1;
    p.rows = count_of(x.sizes) > 0 ? count_of(x.sizes) / p.images / channels : 0;
    if (!binary && kind == MapKind::affine)
      r.elements("scale", accumulator(x.dtype), channels), r.elements("shift", accumulator(x.dtype), channels);
    writes_slices = true;
    r.output(x.sizes, x.dtype, std::move(order));
  }
  void emit(Emitter& e) override {
    const Sizes order = e.of(e.value).order;
    const int x = e.rows(e.operand(0), order, true);
    const int z = !binary ? -1 : p.z_per_image ? e.rows(e.operand(1), order, false) : e.rows(e.operand(1), order, true);
    // One pixel of x itself is read until the end.
    const bool of_itself = p.z_per_image && e.values().position(z).root == e.values().position(x).root;
    if (!of_itself) e.overwrite(x);
    if (z >= 0 && !p.z_per_image) e.overwrite(z);
    p.x_row = e.row(x, order), p.y_row = e.row(e.value, order), p.z_row = z < 0 ? 0 : e.row(z, order);
    const bool dense = p.x_row == p.channels && p.y_row == p.channels && (z < 0 || p.z_row == p.channels);
    const bool alike = kind != MapKind::affine && !has_slope(p.function) && !p.z_per_image;
    if (dense && alike) {
      p.channels *= p.rows * p.images, p.rows = p.images = 1;
      p.x_row = p.y_row = p.channels, p.z_row = z < 0 ? 0 : p.channels;
    }
    e.pass(p,
           MapOperands{.input = e.at(x),
                       .other = e.at(z),
                       .output = e.output(),
                       .scale = e.constant("scale"),
                       .shift = e.constant("shift"),
                       .slope = e.constant("slope")},
           run_map);
  }
};

AI3_STEP(activate, MapStep<MapKind::activate>)
AI3_STEP(add, MapStep<MapKind::add>)
AI3_STEP(multiply, MapStep<MapKind::multiply>)
AI3_STEP(affine, MapStep<MapKind::affine>)

}  // namespace
}  // namespace ai3::ops::program
