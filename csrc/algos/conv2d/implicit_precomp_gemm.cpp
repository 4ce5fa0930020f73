// Indirect convolution (Dukhan, "The Indirect Convolution Algorithm", 2019): an indirection buffer, computed first, says for each
// tap and output pixel where the channels of its input pixel begin (or that they are zero), and the product reads A through it.
// Nothing is gathered: with 8 bytes for a tap and a pixel the buffer is 2 / channels of a float im2col matrix of one image, and
// it serves all images and groups. Input that is not float or double in NHWC is copied once.
#include "backward.h"
#include "delegated.h"
#include "indirect.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

constexpr int64_t kPadding = -1;  // in place of an offset

int64_t conv2d_implicit_precomp_gemm_workspace(const Conv2dProblem& p) {
  if (!is_concrete(p)) return 0;
  return with_type(p.dtype, [&]<class T>() {
    const Indirect<T> indirect(p);
    const int64_t offsets = workspace_bytes<int64_t>(checked_mul(indirect.s.taps, indirect.s.pixels));
    return checked_add(indirect.workspace(), checked_add(workspace_bytes<Acc<T>>(p.in_channels), offsets));
  });
}

template <class T>
void conv2d_implicit_precomp_gemm(const Conv2dProblem& p, const Conv2dOperands& m, Workspace& workspace) {
  using A = Acc<T>;
  const Indirect<T> indirect(p);
  const ConvShape& s = indirect.s;
  const NhwcInput<T> x(p, m.input.read<T>(), workspace);
  A* zeros = workspace.take<A>(p.in_channels);
  clear(zeros, p.in_channels);

  int64_t* offsets = workspace.take<int64_t>(s.taps * s.pixels);
  parallel_for(p.threads, s.taps, [&](int64_t t, int) {
    int64_t* to = offsets + t * s.pixels;
    for (int64_t oh = 0; oh < p.out_height; oh++) {
      const int64_t h = oh * p.stride_h - p.pad_h + t / p.kernel_width * p.dilation_h;
      for (int64_t ow = 0; ow < p.out_width; ow++) {
        const int64_t w = ow * p.stride_w - p.pad_w + t % p.kernel_width * p.dilation_w;
        const bool in = h >= 0 && h < p.in_height && w >= 0 && w < p.in_width;
        *to++ = in ? h * x.stride.h + w * x.stride.w : kPadding;
      }
    }
  });

  indirect.multiply(m, s.taps, workspace, [&](const A** pointers, int64_t image, Share pixels) {
    const int64_t n = pixels.size();
    for (int64_t t = 0; t < s.taps; t++)
      for (int64_t r = 0; r < n; r++) {
        const int64_t offset = offsets[t * s.pixels + pixels.begin + r];
        pointers[t * n + r] = offset == kPadding ? zeros : x.data + image * x.stride.n + offset;
      }
  });
}

Cost conv2d_implicit_precomp_gemm_cost(const Conv2dProblem& p) { return gemm_cost(p, 0, .9); }

AI3_ALGORITHM(conv2d, implicit_precomp_gemm, .epilogue = true, .workspace = conv2d_implicit_precomp_gemm_workspace,
              .cost = conv2d_implicit_precomp_gemm_cost, .packed_bytes = packed_weight_bytes, .pack = pack_weight,
              .gradients = by_patches, .sliced = true)

}  // namespace

const Algorithm<Conv2dProblem>& conv2d_implicit_precomp_gemm_record() { return conv2d_implicit_precomp_gemm_algorithm; }

}  // namespace ai3::inline AI3_LEVEL
