// What csrc/cuda does beside computing: capability, workspaces, chunks, indices of 64 bits, the state of cuBLAS's handle, cuDNN's
// plans and handles. Values, bounds and threads are the matter of the tests that run on the kernels of every level, these among
// them.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <barrier>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <type_traits>
#include <vector>

#include "../../csrc/cuda/core/block.cuh"
#include "../../csrc/cuda/core/pytorch.h"
#include "cublasLt.h"
#include "cublas_v2.h"
#include "cudnn.h"
#include "run.h"

void* ai3::current_blas_handle() { return &fake::blas; }
// The processor's kernel in place of PyTorch's, which needs a GPU.
namespace {
template <class Run>
void flash_on_cpu(const Run& run) {
  using namespace ai3;
  const AlgorithmInfo* const info = algorithm(usable_levels().back(), "attention", "flash");
  if (!info) throw std::runtime_error("no kernel attention_flash");
  run(*reinterpret_cast<const Algorithm<AttentionProblem>*>(info));
}
}  // namespace
void ai3::pytorch_flash_attention(const AttentionProblem& p, const AttentionOperands& m) {
  flash_on_cpu([&](const Algorithm<AttentionProblem>& a) {
    const int64_t bytes = a.traits.workspace(p);
    const Guarded scratch(bytes, Flush::end);
    Workspace workspace{scratch.as<char>(), bytes, 0, nullptr};
    a.run(p, m, workspace);
  });
}
void ai3::pytorch_flash_attention_backward(const AttentionProblem& p, const AttentionGradients& m) {
  flash_on_cpu([&](const Algorithm<AttentionProblem>& a) {
    const int64_t bytes = a.traits.backward_workspace(p, m);
    const Guarded scratch(bytes, Flush::end);
    Workspace workspace{scratch.as<char>(), bytes, 0, nullptr};
    a.traits.backward(p, m, workspace);
  });
}
// A small workspace of cuBLAS: one piece of 1 KiB.
[[maybe_unused]] static const int small = setenv("CUBLAS_WORKSPACE_CONFIG", ":1:1", 1);

namespace {
using namespace ai3;

constexpr int64_t kScratch = 1024;  // of cuBLAS; patches have 4096 bytes, as CMakeLists.txt has it

template <class P>
const Algorithm<P>& on_cuda(const char* operation, const char* name) {
  const AlgorithmInfo* info = algorithm("cuda", operation, name);
  if (!info) throw std::runtime_error(std::string("no CUDA kernel ") + operation + "_" + name);
  return *reinterpret_cast<const Algorithm<P>*>(info);
}

// Sets the device's capability until the end of the block.
struct Capability {
  explicit Capability(int value) : before(fake::capability) { fake::capability = value; }
  ~Capability() { fake::capability = before; }
  int before;
};

// The output on exact integers, compared with the reference.
template <class P>
void expect_exact(const Algorithm<P>& a, const P& p) {
  SCOPED_TRACE(describe(a, p));
  const Inputs<P> in(p, {Flush::end, Values::integers});
  const Guarded y = run(a, p, in, Flush::end, extent(p).output);
  const Reference expected = reference(a.info.operation, p, in.x.values(), in.weight.values(), in.bias.values(),
                                       in.residual.values(), in.slope.values());
  for (int64_t i = 0; i < extent(p).output; i++) ASSERT_EQ(get(p.dtype, y.as<char>(), i), expected.y[i]) << "element " << i;
}

TEST(Cuda, EveryKernelRefusesAGpuThatTheLibraryHasNoCodeFor) {
  int kernels = 0;
  each_kernel([&]<class P>(const Algorithm<P>& a) {
    if (std::string(a.info.level) != "cuda") return;
    SCOPED_TRACE(test_name(a));
    kernels++;
    std::vector<P> all = problems::all(static_cast<P*>(nullptr), a.info.operation);
    if constexpr (std::is_same_v<P, AttentionProblem>)
      for (P& p : all) {
        const std::string name = a.info.name;
        if (name == "flash")
          p.dtype = DType::bf16, p.size = p.value_size = 8, p.queries = p.keys = 4, p.dropout = 0, p.has_mask = false;
        if (name == "math" || name == "flash") continue;
        p.causal = false, p.queries = p.keys;
        p.parameters.values[0] = 2, p.parameters.values[1] = 1;  // projections, a window, lists, blocks
        p.parameters.values[4] = name == "block_sparse";
      }
    Reason ignored{};
    std::erase_if(all, [&](const P& q) { return !supported(a, q, ignored); });
    ASSERT_FALSE(all.empty());
    const P p = all[0];
    ASSERT_TRUE(a.traits.supports) << "asks nothing of the device";
    for (int capability : {0, 80, 89, 90, 120, 121, 130}) {
      const Capability set(capability);
      Reason reason{};
      EXPECT_TRUE(a.traits.supports(p, reason)) << capability << ": " << reason.text;
    }
    const Capability old(75);
    Reason reason{};
    EXPECT_FALSE(a.traits.supports(p, reason));
    EXPECT_STREQ(reason.text, "needs a GPU of compute capability 8.0 or later, got 7.5");
    const Capability between(100);  // code for 9.0 does not run there, and there is no PTX that old
    EXPECT_FALSE(a.traits.supports(p, reason));
    EXPECT_STREQ(reason.text, "was built without code for GPUs of compute capability 10.0 (TORCH_CUDA_ARCH_LIST names those)");
  });
  EXPECT_GE(kernels, 20);
}

TEST(Cuda, CodeOfOneArchitecturesOwnRunsOnThatAlone) {
  constexpr DeviceCode code[] = {AI3_ONLY(90) AI3_REAL(100) AI3_PTX(120)};
  for (const auto& [capability, runs] : {std::tuple{90, std::array{true, false, false}},
                                         {91, {false, false, false}},
                                         {80, {false, false, false}},
                                         {100, {false, true, false}},
                                         {103, {false, true, false}},
                                         {110, {false, false, false}},
                                         {121, {false, false, true}}})
    for (size_t i = 0; i < 3; i++) EXPECT_EQ(code[i].runs_on(capability), runs[i]) << capability << ": " << i;
}

TEST(Cuda, WhatIsTooLargeForCublasIsRefused) {
  const int64_t many = int64_t{1} << 31;
  const auto& gemm = on_cuda<LinearProblem>("linear", "gemm");
  LinearProblem p{};
  p.dtype = DType::f32, p.rows = many, p.in_features = p.out_features = 1;
  Reason reason{};
  EXPECT_FALSE(gemm.traits.supports(p, reason));
  EXPECT_STREQ(reason.text, "needs matrices of at most 2147483647 rows and columns for cuBLAS, got 2147483648");
  p.rows = many - 1;
  EXPECT_TRUE(gemm.traits.supports(p, reason));
  const auto& im2col = on_cuda<Conv2dProblem>("conv2d", "im2col");
  Conv2dProblem pointwise = problems::conv2d({1 << 15, 1, 1 << 8, 1 << 8, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1}, true, false);
  EXPECT_FALSE(im2col.traits.supports(pointwise, reason));
  pointwise.batch /= 2;
  EXPECT_TRUE(im2col.traits.supports(pointwise, reason));
  pointwise.batch = -1;  // not known
  EXPECT_TRUE(im2col.traits.supports(pointwise, reason));
}

TEST(Cuda, ALaunchThatFailsIsAnErrorThatNamesTheKernel) {
  const auto& relu = on_cuda<ElementwiseProblem>("relu", "direct");
  Workspace workspace{nullptr, 0, 0, nullptr};
  float x = 1, y = 0;
  const UnaryOperands buffers{&x, &y};
  fake::fail_launches = true;
  try {
    relu.run(contiguous_elements(DType::f32, 1, 1), buffers, workspace);
    ADD_FAILURE() << "no error";
  } catch (const std::runtime_error& e) {
    EXPECT_STREQ(e.what(), "ai3: relu_direct failed: invalid configuration argument");
  }
  fake::fail_launches = false;
  EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "the error is left to the next kernel";
}

TEST(Cuda, CublasGetsTheCallsWorkspaceAndItsHandleIsAsBefore) {
  const auto& gemm = on_cuda<LinearProblem>("linear", "gemm");
  LinearProblem p{};
  p.rows = 3, p.in_features = p.x_row = 5, p.out_features = p.y_row = 4, p.has_bias = true;
  const auto tf32 = static_cast<int>(CUBLAS_TF32_TENSOR_OP_MATH);
  for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16})
    for (bool allow_tf32 : {false, true}) {
      p.dtype = dtype, p.allow_tf32 = allow_tf32;
      fake::blas = {};
      fake::blas.math = CUBLAS_DEFAULT_MATH;
      const auto stream = reinterpret_cast<cudaStream_t>(&p);
      cublasSetStream(&fake::blas, stream);
      expect_exact(gemm, p);
      EXPECT_EQ(fake::blas.products, 1);
      EXPECT_EQ(fake::blas.stream_used, stream);
      EXPECT_EQ(fake::blas.math, CUBLAS_DEFAULT_MATH) << "PyTorch's handle is left in another mode";
      EXPECT_EQ(fake::blas.stream, stream);
      EXPECT_EQ(fake::blas.workspace, nullptr) << "PyTorch's handle is left with the call's workspace";
      EXPECT_TRUE(fake::blas.math_used & CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION);
      EXPECT_EQ((fake::blas.math_used & tf32) == tf32, allow_tf32);
      EXPECT_EQ(fake::blas.compute_used, dtype == DType::f64                 ? CUBLAS_COMPUTE_64F
                                         : dtype == DType::f32 && allow_tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                                             : CUBLAS_COMPUTE_32F);
    }
}

TEST(Cuda, CublasLtGetsTheCallsStreamAndWorkspaceAndIsToldHowTensorsLie) {
  const auto& cublaslt = on_cuda<LinearProblem>("linear", "cublaslt");
  LinearProblem p{};
  p.rows = 3, p.in_features = p.x_row = 5, p.out_features = p.y_row = 4;
  for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16})
    for (bool allow_tf32 : {false, true})
      for (bool bias : {false, true}) {
        p.dtype = dtype, p.allow_tf32 = allow_tf32, p.has_bias = bias;
        fake::lt = {}, fake::blas = {}, fake::launches = 0;
        expect_exact(cublaslt, p);
        EXPECT_EQ(fake::lt.products, 1);
        EXPECT_EQ(fake::lt.descriptors, 0) << "descriptors are left";
        EXPECT_EQ(fake::blas.stream, nullptr);
        EXPECT_EQ(fake::blas.workspace, nullptr) << "PyTorch's handle is left with the call's workspace";
        EXPECT_EQ(fake::lt.compute_used, dtype == DType::f64                 ? CUBLAS_COMPUTE_64F
                                         : dtype == DType::f32 && allow_tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                                             : CUBLAS_COMPUTE_32F);
        EXPECT_EQ(fake::lt.algorithm_used.schemes, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE) << "adds rounded parts of sums";
        EXPECT_EQ(fake::lt.algorithm_used.workspace, kScratch);
        const bool apart = bias && size_of(dtype) == 2;
        EXPECT_EQ(fake::lt.bias_used != nullptr, bias && !apart) << "the store adds it";
        EXPECT_EQ(fake::launches, apart) << "a pass over the output";
      }
  // Of what lies at any multiple of its elements, nothing more is said.
  alignas(256) float x[20], w[24], y[13], b[4];
  alignas(256) char scratch[kScratch];
  std::fill_n(x, 20, 1.f), std::fill_n(w, 24, 1.f), std::fill_n(b, 4, 2.f);
  p.dtype = DType::f32, p.has_bias = true;
  Workspace workspace{scratch, kScratch, 0, &p};
  cublaslt.run(p, {x + 4, w + 2, b, nullptr, y + 1}, workspace);
  EXPECT_EQ(y[12], 7);
  EXPECT_EQ(fake::lt.stream_used, reinterpret_cast<cudaStream_t>(&p));
  EXPECT_EQ(fake::lt.workspace_used, scratch);
  const uint32_t expected[] = {8, 16, 4, 4};  // of w, x, y, y
  EXPECT_TRUE(std::ranges::equal(fake::lt.algorithm_used.alignment, expected));
}

TEST(Cuda, WhatCublasLtRefusesIsAnError) {
  LinearProblem p{};
  p.rows = p.in_features = p.x_row = p.out_features = p.y_row = 1;
  fake::lt.refuses = true;
  try {
    expect_exact(on_cuda<LinearProblem>("linear", "cublaslt"), p);
    ADD_FAILURE() << "no error";
  } catch (const std::runtime_error& e) {
    EXPECT_STREQ(e.what(), "ai3: cublasLtMatmulAlgoGetHeuristic: CUBLAS_STATUS_NOT_SUPPORTED");
  }
  fake::lt.refuses = false;
  EXPECT_EQ(fake::lt.descriptors, 0) << "descriptors are left";
}

// cuBLAS wants its workspace aligned to 256 bytes, as the memory of a call begins.
TEST(Cuda, CublasGetsTheBeginningOfTheWorkspace) {
  const auto& im2col = on_cuda<Conv2dProblem>("conv2d", "im2col");
  const Conv2dProblem p = problems::conv2d(problems::conv3x3(1, 3, 5, 5, 4, 1), true, false);
  const Inputs<Conv2dProblem> in(p, {Flush::end, Values::integers});
  const int64_t bytes = im2col.traits.workspace(p);
  const Guarded y(extent(p).output * 4, Flush::end), scratch(bytes, Flush::begin);
  Workspace workspace{scratch.as<char>(), bytes, 0, nullptr};
  im2col.run(p, {in.x.stored(), in.weight.stored(), nullptr, nullptr, y.as<char>()}, workspace);
  EXPECT_EQ(fake::blas.workspace_used, scratch.as<char>());
}

TEST(Cuda, Im2colIsCutIntoImagesAndRows) {
  const auto& im2col = on_cuda<Conv2dProblem>("conv2d", "im2col");
  for (bool nhwc : {false, true}) {
    // 8 pixels of patches of 27 floats: 864 bytes an image, so 4 of 5 at once.
    const Conv2dProblem images = problems::conv2d({5, 3, 4, 6, 2, 3, 3, 1, 1, 0, 0, 1, 1, 1}, nhwc, true);
    EXPECT_EQ(im2col.traits.workspace(images), kScratch + round_up(4 * 864, 256));
    fake::blas = {};
    expect_exact(im2col, images);
    EXPECT_EQ(fake::blas.products, 2);
    // Patches of a row of 17 pixels take 1224 bytes: three of eight rows at once, of each of two images, in two groups.
    const Conv2dProblem rows = problems::conv2d({2, 2, 10, 19, 4, 3, 3, 1, 1, 0, 0, 1, 1, 2}, nhwc, true);
    EXPECT_EQ(im2col.traits.workspace(rows), kScratch + round_up(3 * 1224, 256));
    fake::blas = {};
    expect_exact(im2col, rows);
    EXPECT_EQ(fake::blas.products, 2 * 3 * 2);
  }
}

// 64 channels at 4K were 19 GB of patches.
TEST(Cuda, Im2colTakesNoMoreForAnImageThanItsLimitOrOneRow) {
  const auto& im2col = on_cuda<Conv2dProblem>("conv2d", "im2col");
  const Conv2dProblem p = problems::conv2d(problems::conv3x3(1, 64, 2160, 3840, 64, 1), true, true);
  EXPECT_EQ(im2col.traits.workspace(p), kScratch + round_up(int64_t{64} * 9 * 3840 * 4, 256));
  Conv2dProblem largest = p;
  largest.in_channels = int64_t{1} << 40, largest.in_width = largest.out_width = int64_t{1} << 40;
  EXPECT_EQ(im2col.traits.workspace(largest), kOverflow) << "a product that wraps";
}

TEST(Cuda, Im2colMultipliesThePixelsOfAPointwiseLayerWhereTheyLie) {
  const auto& im2col = on_cuda<Conv2dProblem>("conv2d", "im2col");
  for (int64_t groups : {1, 3})
    for (bool nhwc : {false, true})
      for (bool bias : {false, true}) {
        const Conv2dProblem p = problems::conv2d({2, 6, 7, 9, 12, 1, 1, 1, 1, 0, 0, 1, 1, groups}, nhwc, bias);
        EXPECT_EQ(im2col.traits.workspace(p), kScratch);
        fake::launches = 0;
        expect_exact(im2col, p);
        EXPECT_EQ(fake::launches, bias) << "nothing but the bias is copied";
      }
}

// Positions in the padding are beyond 2^31, although every element's offset is small. In 32 bits they would wrap to what is
// outside as well, which UndefinedBehaviorSanitizer sees.
TEST(Cuda, PositionsBeyondThirtyTwoBits) {
  const int64_t far = int64_t{1} << 30;
  for (const char* name : {"direct", "im2col", "implicit_gemm", "implicit_precomp_gemm"})
    for (bool nhwc : {false, true}) {
      expect_exact(on_cuda<Conv2dProblem>("conv2d", name),
                   problems::conv2d({1, 2, 3, 4, 3, 3, 1, 1, 1, far, 0, far, 1, 1}, nhwc, true));
      expect_exact(on_cuda<Conv2dProblem>("conv2d", name),
                   problems::conv2d({1, 2, 4, 3, 3, 1, 3, 1, 1, 0, far, 1, far, 1}, nhwc, true));
    }
}

// One pixel comes out of an image in NCHW: its strides are also those of NHWC.
TEST(Cuda, AnOutputOfOnePixelDoesNotSayHowTheInputLies) {
  int done = 0;
  each_kernel([&]<class P>(const Algorithm<P>& a) {
    if constexpr (std::is_same_v<P, Conv2dProblem>) {
      const Conv2dProblem p = problems::conv2d({2, 4, 3, 3, 4, 3, 3, 1, 1, 0, 0, 1, 1, 1}, false, true);
      Reason reason{};
      if (std::string(a.info.level) != "cuda" || a.traits.accuracy != Accuracy::exact || !supported(a, p, reason)) return;
      expect_exact(a, p), done++;
    }
  });
  EXPECT_GE(done, 7);
}

// As close as two ways to sum are; NaN where it is NaN.
void expect_alike(DType dtype, const char* got, const char* expected, int64_t count, const char* what) {
  const double tolerance = dtype == DType::f64 ? 1e-13 : dtype == DType::f32 ? 2e-5 : dtype == DType::f16 ? 2e-3 : 1.6e-2;
  double largest = 0;
  for (int64_t i = 0; i < count; i++) largest = std::fmax(largest, std::fabs(get(dtype, expected, i)));
  for (int64_t i = 0; i < count; i++) {
    const double a = get(dtype, got, i), b = get(dtype, expected, i);
    if (std::isnan(a) != std::isnan(b) || std::fabs(a - b) > tolerance * largest)
      FAIL() << what << ", element " << i << " is " << a << ", on the CPU " << b;
  }
}
// Values whose squares a type cannot hold, or that differ by little from a mean that is not small, and gradients: as the CPU's
// kernels compute them, which the tests of the operators compare with PyTorch's.
TEST(Cuda, NormsAreThoseOfTheCpu) {
  constexpr std::pair<double, double> ranges[] = {{1, 0}, {1e-30, 0}, {1e18, 0}, {1e38, 0}, {1e-2, 1000}, {0, 3}};
  int done = 0;
  auto compare = [&]<class P>(const Algorithm<P>& a, const Algorithm<P>& cpu, const P& p, double scale, double shift) {
    SCOPED_TRACE(describe(a, p) + " of " + std::to_string(scale) + " around " + std::to_string(shift));
    Inputs<P> in(p, {Flush::end, Values::reals});
    const int64_t count = extent(p).input;
    auto x = std::make_unique<Guarded>(count * size_of(p.dtype), Flush::end);
    for (int64_t i = 0; i < count; i++)
      put(p.dtype, x->template as<char>(), i, in.x.doubles[static_cast<size_t>(i)] * scale + shift);
    in.x.memory = std::move(x);
    const Guarded ours = run(a, p, in, Flush::end, count), theirs = run(cpu, p, in, Flush::end, count);
    expect_alike(p.dtype, ours.as<char>(), theirs.as<char>(), count, "the output");
    if (scale == 0) return;  // rows without a variance have no gradient but that of rounding
    const Data grad(p.dtype, count, Flush::end, Values::reals, 5);
    for (bool of_weight : {false, true}) {
      if (of_weight && extent(p).weight == 0) continue;
      const DType dtype = of_weight ? Inputs<P>::weight_type(p) : p.dtype;
      const auto got = run_backward(a, p, in, grad, of_weight, Flush::end),
                 expected = run_backward(cpu, p, in, grad, of_weight, Flush::end);
      ASSERT_EQ(got.size(), expected.size());
      expect_alike(dtype, got.data(), expected.data(), static_cast<int64_t>(got.size()) / size_of(dtype),
                   of_weight ? "the gradient of weight and bias" : "the input's gradient");
    }
    done++;
  };
  each_kernel([&]<class P>(const Algorithm<P>& a) {
    if constexpr (requires(P p) { p.wide_weight; }) {
      if (std::string(a.info.level) != "cuda") return;
      const AlgorithmInfo* info = nullptr;
      for (const std::string& level : usable_levels())
        if (!info) info = algorithm(level, a.info.operation, a.info.name);
      const auto* cpu = reinterpret_cast<const Algorithm<P>*>(info);
      ASSERT_TRUE(cpu && has_backward(a, P{}, true) && has_backward(*cpu, P{}, true)) << test_name(a);
      for (P p : problems::all(static_cast<P*>(nullptr), a.info.operation))
        for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16})
          for (const auto& [scale, shift] : ranges) {
            const bool is_plain = scale == 1, by_batch = std::is_same_v<P, BatchNormProblem>, narrow = size_of(dtype) == 2;
            if (!is_compiled(cpu->info.level, dtype) || (!is_plain && (by_batch || dtype != DType::f32))) continue;
            if (!by_batch && extent(p).terms < 5) continue;  // of one or two elements nothing but rounding is left
            if constexpr (requires { p.rows; })
              if (p.rows > 10) continue;  // take long
            if (extent(p).input > 1000 && !(is_plain && dtype == DType::f32)) continue;
            p.dtype = dtype, p.wide_weight = narrow && extent(p).weight % 2;
            compare(a, *cpu, p, scale, shift);
            if (testing::Test::HasFailure()) return;
          }
    }
  });
  EXPECT_GT(done, 50);
}

// The algorithms of CUDA that a block's threads work on together, with threads in another order each time.
TEST(Fibers, NoResultDependsOnTheOrderOfThreads) {
  const std::pair<const char*, const char*> kernels[] = {{"softmax", "direct"},  {"layer_norm", "direct"},
                                                         {"rms_norm", "direct"}, {"group_norm", "direct"},
                                                         {"conv2d", "smm"},      {"attention", "math"}};
  each_kernel([&]<class P>(const Algorithm<P>& a) {
    const bool together = std::ranges::any_of(
        kernels, [&](const auto& k) { return std::string(k.first) == a.info.operation && std::string(k.second) == a.info.name; });
    if (std::string(a.info.level) != "cuda" || !together) return;
    const int64_t before = fake::barriers;
    for (const P& p : problems::all(static_cast<P*>(nullptr), a.info.operation)) {
      const Inputs<P> in(p, {Flush::end, Values::reals});
      const size_t bytes = static_cast<size_t>(extent(p).output * size_of(p.dtype));
      const Guarded first = run(a, p, in, Flush::end, extent(p).output);
      for (unsigned seed : {1u, 2u, 3u}) {
        fake::seed = seed;
        const Guarded other = run(a, p, in, Flush::end, extent(p).output);
        fake::seed = 0;
        ASSERT_EQ(std::memcmp(first.as<char>(), other.as<char>(), bytes), 0) << describe(a, p) << ", order " << seed;
      }
    }
    EXPECT_GT(fake::barriers, before) << test_name(a) << " has no barrier";
  });
}

// Each thread hands its number to the next by shared memory, and takes another turn. `left_out` is a barrier that is missing.
constexpr unsigned kThreads = 96;
void pass_on(int left_out, int* sums) {
  int* const memory = shared<int>();
  int sum = 0;
  for (int turn = 0; turn < 3; turn++) {
    memory[threadIdx.x] = static_cast<int>(threadIdx.x) + turn;
    if (left_out != 0) __syncthreads();
    sum += memory[(threadIdx.x + 1) % kThreads];
    if (left_out != 1) __syncthreads();
  }
  sums[threadIdx.x] = sum;
}
TEST(Fibers, ABarrierThatIsMissingShows) {
  const Workspace workspace{nullptr, 0, 0, nullptr};
  auto is_right = [&](int left_out, unsigned seed) {
    int sums[kThreads];
    fake::seed = seed;
    launch(pass_on, {1}, kThreads, sizeof(sums), workspace, "pass_on", left_out, &sums[0]);
    fake::seed = 0;
    for (unsigned i = 0; i < kThreads; i++)
      if (sums[i] != static_cast<int>(3 * ((i + 1) % kThreads) + 3)) return false;
    return true;
  };
  for (unsigned seed : {0u, 1u, 2u, 3u}) {
    EXPECT_TRUE(is_right(-1, seed)) << seed;
    EXPECT_FALSE(is_right(0, seed)) << seed;
    EXPECT_FALSE(is_right(1, seed)) << seed;
  }
}

void wait_alone(int) {
  if (threadIdx.x < kThreads / 2) __syncthreads();
}
TEST(Fibers, ABarrierThatSomeNeverReachIsAnError) {
  const Workspace workspace{nullptr, 0, 0, nullptr};
  for (unsigned seed : {0u, 1u}) {
    fake::seed = seed;
    try {
      launch(wait_alone, {1}, kThreads, 0, workspace, "wait_alone", 0);
      ADD_FAILURE() << "no error";
    } catch (const std::runtime_error& e) {
      EXPECT_STREQ(e.what(), "ai3: wait_alone failed: some threads of a block wait for others that never come");
    }
    fake::seed = 0;
  }
}

void reduce_numbers(double* sums, int* largest) {
  char* const memory = shared<char>();
  sums[threadIdx.x] = reduce<kThreads>(threadIdx.x + 0.5, reinterpret_cast<double*>(memory), Sum());
  largest[threadIdx.x] =
      reduce<kThreads>(static_cast<int>(threadIdx.x * 7 % kThreads), reinterpret_cast<int*>(memory), Largest());
}
TEST(Fibers, ABlockReducesForAllOfItsThreads) {
  const Workspace workspace{nullptr, 0, 0, nullptr};
  for (unsigned seed : {0u, 1u, 2u}) {
    double sums[kThreads];
    int largest[kThreads];
    fake::seed = seed;
    launch(reduce_numbers, {1}, kThreads, reduce_bytes<double>(kThreads), workspace, "reduce_numbers", &sums[0], &largest[0]);
    fake::seed = 0;
    for (unsigned i = 0; i < kThreads; i++) {
      EXPECT_EQ(sums[i], kThreads * kThreads / 2.0);
      EXPECT_EQ(largest[i], kThreads - 1);
    }
  }
}

// Every call of the tests below is a problem that no other test has.
Conv2dProblem dnn_problem(int64_t height) {
  return problems::conv2d({1, 2, height, 3, 4, 3, 3, 1, 1, 1, 1, 1, 1, 2}, false, true);
}
const Algorithm<Conv2dProblem>& precomp() { return on_cuda<Conv2dProblem>("conv2d", "implicit_precomp_gemm"); }

TEST(Cudnn, AProblemIsAskedOnceAndOfEachDevice) {
  const Conv2dProblem p = dnn_problem(101);
  const int64_t before = fake::dnn_queries;
  for (int i = 0; i < 3; i++) expect_exact(precomp(), p);
  EXPECT_EQ(precomp().traits.workspace(p), 256) << "cuDNN's 100 bytes, in multiples of 256";
  EXPECT_EQ(fake::dnn_queries - before, 1);
  std::thread([&] { expect_exact(precomp(), p); }).join();
  EXPECT_EQ(fake::dnn_queries - before, 1) << "another thread asks again";
  fake::device = 1;
  expect_exact(precomp(), p);
  EXPECT_EQ(fake::dnn_device_used, 1);
  fake::device = 0;
  EXPECT_EQ(fake::dnn_queries - before, 2);
  Conv2dProblem other = p;  // differs in what the descriptors or the answer depend on
  other.allow_tf32 = true;
  expect_exact(precomp(), other);
  other.dtype = DType::f64;
  expect_exact(precomp(), other);
  EXPECT_EQ(fake::dnn_queries - before, 4);
}

TEST(Cudnn, PlansAreBounded) {
  const int64_t before = fake::dnn_descriptors;
  Reason reason{};
  for (int64_t i = 0; i < 3000; i++) ASSERT_TRUE(precomp().traits.supports(dnn_problem(1000 + i), reason)) << reason.text;
  EXPECT_LE(fake::dnn_descriptors, std::max<int64_t>(before, 6 * 1026));
  EXPECT_GT(fake::dnn_descriptors, 6) << "keeps none";
}

TEST(Cudnn, EachThreadHasAHandleThatTheNextTakesOver) {
  const Conv2dProblem p = dnn_problem(102);
  int64_t made = 0;
  for (int round = 0; round < 5; round++) {
    const fake::Dnn* used[4];
    {
      std::barrier alive(4);  // until each has called
      std::vector<std::jthread> threads;
      for (auto& handle : used)
        threads.emplace_back([&] {
          for (int i = 0; i < 10; i++) expect_exact(precomp(), p);
          handle = fake::dnn_handle_used;
          alive.arrive_and_wait();
        });
    }
    EXPECT_EQ(std::set(std::begin(used), std::end(used)).size(), 4) << "threads share a handle";
    if (round == 0) made = fake::dnn_handles;
  }
  for (int i = 0; i < 20; i++) std::thread([&] { expect_exact(precomp(), p); }).join();
  EXPECT_EQ(fake::dnn_handles, made) << "threads that have ended leave their handles to others";
}

TEST(Cudnn, RunsOnTheCallsStream) {
  const Conv2dProblem p = dnn_problem(103);
  const Inputs<Conv2dProblem> in(p, {Flush::end, Values::integers});
  const int64_t bytes = precomp().traits.workspace(p);
  const Guarded y(extent(p).output * 4, Flush::end), scratch(bytes, Flush::end);
  for (void* stream : {static_cast<void*>(y.as<char>()), static_cast<void*>(nullptr)}) {
    Workspace workspace{scratch.as<char>(), bytes, 0, stream};
    precomp().run(p, {in.x.stored(), in.weight.stored(), in.bias.stored(), nullptr, y.as<char>()}, workspace);
    EXPECT_EQ(fake::dnn_stream_used, stream);
    EXPECT_EQ(workspace.used, bytes);
  }
}

TEST(Cudnn, FloatsAreRoundedToTf32OnlyWhereThatIsAllowed) {
  Conv2dProblem p = dnn_problem(104);
  for (bool allow_tf32 : {false, true})
    for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
      p.dtype = dtype, p.allow_tf32 = allow_tf32;
      expect_exact(precomp(), p);
      EXPECT_EQ(fake::dnn_math_used, size_of(dtype) == 2                  ? CUDNN_TENSOR_OP_MATH
                                     : dtype == DType::f32 && !allow_tf32 ? CUDNN_FMA_MATH
                                                                          : CUDNN_DEFAULT_MATH);
    }
}

TEST(Cudnn, RefusalsAreInItsOwnWords) {
  Reason reason{};
  fake::dnn_answer = CUDNN_STATUS_NOT_SUPPORTED;
  EXPECT_FALSE(precomp().traits.supports(dnn_problem(105), reason));
  EXPECT_STREQ(reason.text, "cuDNN refuses: CUDNN_STATUS_NOT_SUPPORTED: for a test");
  // A failure that is not the problem's is not kept.
  fake::dnn_answer = CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED;
  try {
    precomp().traits.workspace(dnn_problem(106));
    ADD_FAILURE() << "no error";
  } catch (const std::runtime_error& e) {
    EXPECT_STREQ(e.what(),
                 "ai3: cudnnGetConvolutionForwardWorkspaceSize: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED: "
                 "for a test");
  }
  EXPECT_THROW(precomp().traits.supports(dnn_problem(108), reason), std::runtime_error) << "a refusal would be remembered";
  fake::dnn_answer = CUDNN_STATUS_SUCCESS;
  EXPECT_FALSE(precomp().traits.supports(dnn_problem(105), reason)) << "a refusal is asked for once";
  EXPECT_TRUE(precomp().traits.supports(dnn_problem(106), reason)) << reason.text;
  EXPECT_TRUE(precomp().traits.supports(dnn_problem(108), reason)) << reason.text;
  // What 32 bits do not hold.
  EXPECT_FALSE(precomp().traits.supports(dnn_problem(int64_t{1} << 31), reason));
  EXPECT_STREQ(reason.text, "cuDNN takes sizes and strides below 2147483648, got 25769803776");
}

// What is our own mistake, or the installation's, must not pass for something that the device lacks.
TEST(Cudnn, OnlyWhatTheDeviceLacksIsARefusal) {
  Reason reason{};
  int64_t height = 2000;
  for (int status : {3000, 3001, 3002, 3003, 3004, 3007, 3010, 3011}) {
    fake::dnn_answer = static_cast<cudnnStatus_t>(status);
    EXPECT_FALSE(precomp().traits.supports(dnn_problem(height++), reason)) << status;
  }
  for (int status : {1001, 2000, 2002, 2003, 2006, 2010, 3005, 3006, 3008, 3009, 3012, 3013, 3014, 4000, 5000}) {
    fake::dnn_answer = static_cast<cudnnStatus_t>(status);
    EXPECT_THROW(precomp().traits.supports(dnn_problem(height), reason), std::runtime_error) << status;
    EXPECT_THROW(precomp().traits.workspace(dnn_problem(height++)), std::runtime_error) << status;
  }
  fake::dnn_answer = CUDNN_STATUS_NOT_SUPPORTED_SUBLIBRARY_UNAVAILABLE;
  try {
    precomp().traits.workspace(dnn_problem(height));
    ADD_FAILURE() << "no error";
  } catch (const std::runtime_error& e) {
    EXPECT_STREQ(e.what(),
                 "ai3: cudnnGetConvolutionForwardWorkspaceSize: CUDNN_STATUS_NOT_SUPPORTED_SUBLIBRARY_UNAVAILABLE: for a test");
  }
  fake::dnn_answer = CUDNN_STATUS_SUCCESS;
}

TEST(Cudnn, ItsOwnTableHasEveryMethodUnderItsName) {
  const std::pair<const char*, cudnnConvolutionFwdAlgo_t> methods[] = {
      {"implicit_gemm", CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_GEMM},
      {"implicit_precomp_gemm", CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM},
      {"gemm", CUDNN_CONVOLUTION_FWD_ALGO_GEMM},
      {"fft", CUDNN_CONVOLUTION_FWD_ALGO_FFT},
      {"fft_tiling", CUDNN_CONVOLUTION_FWD_ALGO_FFT_TILING},
      {"winograd", CUDNN_CONVOLUTION_FWD_ALGO_WINOGRAD},
      {"winograd_nonfused", CUDNN_CONVOLUTION_FWD_ALGO_WINOGRAD_NONFUSED}};
  const Capability older(80);  // from 9.0 on cuDNN has no Winograd in one kernel
  for (const auto& [name, method] : methods) {
    expect_exact(on_cuda<Conv2dProblem>("conv2d", name), problems::conv2d(problems::conv3x3(1, 3, 5, 8, 4, 1), false, true));
    EXPECT_EQ(fake::dnn_algorithm_used, method) << name;
  }
}

TEST(Cudnn, MethodsThatWouldRoundBeforeABiasRefuseItIn16Bits) {
  Conv2dProblem p = problems::conv2d(problems::conv3x3(1, 3, 5, 8, 4, 1), false, true);
  for (const char* name : {"gemm", "fft", "fft_tiling", "implicit_gemm"})
    for (DType dtype : {DType::f32, DType::f16})
      for (bool bias : {false, true}) {
        p.dtype = dtype, p.has_bias = bias;
        Reason reason;
        const bool refused = bias && dtype == DType::f16 && std::string(name) != "implicit_gemm";
        EXPECT_EQ(supported(on_cuda<Conv2dProblem>("conv2d", name), p, reason), !refused)
            << name << " " << name_of(dtype) << bias;
      }
}

TEST(Cudnn, WinogradIsOursWhereItHasNone) {
  Conv2dProblem p = problems::conv2d(problems::conv3x3(1, 3, 5, 8, 4, 1), false, true);
  const auto &winograd = on_cuda<Conv2dProblem>("conv2d", "winograd"), &own = on_cuda<Conv2dProblem>("conv2d", "winograd_f4");
  const int64_t bytes = own.traits.workspace(p) + own.traits.packed_bytes(p);
  EXPECT_EQ(winograd.traits.workspace(p), bytes);
  const Capability older(80);
  EXPECT_NE(winograd.traits.workspace(p), bytes);
}

// In any other order cuDNN rearranges a filter of tensor cores in every call; without them it would copy the images instead.
TEST(Cudnn, FiltersOfTensorCoresAreKrscBesideChannelsLast) {
  for (const char* name : {"implicit_gemm", "implicit_precomp_gemm"})
    for (bool nhwc : {false, true})
      for (bool allow_tf32 : {false, true})
        for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
          Conv2dProblem p = problems::conv2d({1, 6, 5, 7, 4, 3, 2, 1, 1, 1, 1, 1, 1, 2}, nhwc, true);
          p.dtype = dtype, p.allow_tf32 = allow_tf32;
          const auto& a = on_cuda<Conv2dProblem>("conv2d", name);
          const bool krsc = nhwc && (size_of(dtype) == 2 || (dtype == DType::f32 && allow_tf32));
          EXPECT_EQ(a.traits.packed_bytes(p), krsc ? round_up(4 * 3 * 3 * 2 * size_of(dtype), 256) : 0);
          expect_exact(a, p);
          EXPECT_EQ(fake::dnn_format_used == CUDNN_TENSOR_NHWC, krsc) << name << " " << name_of(dtype);
        }
}

TEST(Cudnn, ABiasIsAddedByTheStoreWhereCudnnHasThat) {
  for (bool fuses : {true, false}) {
    fake::dnn_fuses_bias = fuses;
    fake::launches = 0;
    expect_exact(precomp(), problems::conv2d(problems::conv3x3(1, 3, 5, 9, 4, 1), false, true));
    EXPECT_EQ(fake::launches, !fuses) << "a pass over the output";
  }
  fake::dnn_fuses_bias = true;
}

// Each new thread makes a handle, which allocates memory: not part of a graph, and not allowed in a capture as such.
TEST(Cudnn, AFirstCallMayBeCaptured) {
  const Conv2dProblem p = dnn_problem(109);
  std::barrier alive(8);
  std::vector<std::jthread> threads;
  const int64_t before = fake::dnn_handles;
  for (int i = 0; i < 8; i++)
    threads.emplace_back([&] {
      fake::capturing = true;
      expect_exact(precomp(), p);
      EXPECT_EQ(fake::capture_mode, cudaStreamCaptureModeGlobal) << "the thread is left in another mode";
      alive.arrive_and_wait();
    });
  threads.clear();
  EXPECT_GT(fake::dnn_handles, before) << "no thread made one";
}

// Sets what engines the graph interface has until the end of the block.
struct Engines {
  Engines(std::initializer_list<fake::DnnEngine> engines) { fake::dnn_engines = engines; }
  ~Engines() { fake::dnn_engines = fake::kDnnEngines; }
};
const Algorithm<Conv2dProblem>& by_graph() { return on_cuda<Conv2dProblem>("conv2d", "cudnn"); }
// On exact integers whose memory begins at multiples of 16 bytes, or at no such.
void expect_exact_by_graph(const Conv2dProblem& p, bool aligned) {
  const Flush flush = aligned ? Flush::begin : Flush::end;
  const Inputs<Conv2dProblem> in(p, {flush, Values::integers});
  const Guarded y = run(by_graph(), p, in, flush, extent(p).output);
  const Reference expected = reference("conv2d", p, in.x.values(), in.weight.values(), in.bias.values(), nullptr, nullptr);
  for (int64_t i = 0; i < extent(p).output; i++) ASSERT_EQ(get(p.dtype, y.as<char>(), i), expected.y[i]) << "element " << i;
}

TEST(CudnnGraph, ThePlanIsTheFirstThatComputesAsItIsAskedFor) {
  for (bool aligned : {true, false})
    for (bool bias : {true, false})
      for (bool allow_tf32 : {true, false})
        for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
          Conv2dProblem p = problems::conv2d(problems::conv3x3(1, 3, 5, 7, 4, 1), false, bias);
          p.dtype = dtype, p.allow_tf32 = allow_tf32;
          fake::launches = 0;
          expect_exact_by_graph(p, aligned);
          // Of those without a note against them: on tensor cores, which round float32, and the fallback's, which takes any
          // memory.
          const bool strict = dtype == DType::f32 && !allow_tf32;
          EXPECT_EQ(fake::dnn_engine_used, strict || !aligned ? 5 : 4) << name_of(dtype) << aligned << allow_tf32;
          EXPECT_EQ(fake::dnn_alignment_used, aligned ? 16 : size_of(dtype));
          EXPECT_EQ(by_graph().traits.workspace(p), strict ? 256 : 512) << "of either kind of memory";
          EXPECT_EQ(fake::launches, 0) << "a pass for the bias";
        }
}

// What precompiled engines add only along with a bias is added along with zeros.
TEST(CudnnGraph, ResidualAndReluArePartsOfThePlan) {
  for (int adds = 0; adds < 8; adds++)
    for (bool nhwc : {true, false}) {
      const bool bias = adds & 1, residual = adds & 2, relu = adds & 4;
      for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
        Conv2dProblem p = problems::conv2d(problems::conv3x3(1, 3, 5, 7, 4, 1), nhwc, bias);
        p.dtype = dtype, p.has_residual = residual, p.activation = relu ? Activation::relu : Activation::none;
        const Inputs<Conv2dProblem> in(p, {Flush::begin, Values::integers});
        const Reference expected = reference("conv2d", p, in.x.values(), in.weight.values(), in.bias.values(),
                                             residual ? in.residual.values() : nullptr, nullptr);
        for (bool onto : {false, true}) {
          if (onto && !residual) continue;
          fake::launches = 0;
          const Guarded y = run(by_graph(), p, in, Flush::begin, extent(p).output, onto);
          for (int64_t i = 0; i < extent(p).output; i++)
            ASSERT_EQ(get(dtype, y.as<char>(), i), expected.y[i]) << name_of(dtype) << bias << residual << onto << i;
          EXPECT_LE(fake::launches, size_of(dtype) == 2 && nhwc) << "a pass behind the plan; filters alone are packed";
        }
      }
    }
  EXPECT_EQ(by_graph().traits.activations, activation_bit(Activation::relu));
}

TEST(CudnnGraph, GradientsAreItsOwnWhereItHasThem) {
  for (bool nhwc : {true, false})
    for (const problems::Conv& c : {problems::conv3x3(2, 4, 5, 7, 6, 1), problems::conv3x3(1, 4, 5, 7, 6, 2, 2),
                                    problems::Conv{2, 3, 9, 8, 5, 3, 2, 2, 1, 1, 0, 2, 1, 1}})
      for (int i = 0; i < 10; i++) {
        const DType dtypes[] = {DType::f32, DType::f64, DType::bf16, DType::f16, DType::f32}, dtype = dtypes[i % 5];
        const Flush flush = i < 5 ? Flush::begin : Flush::end;  // at multiples of 16 bytes, and not
        Conv2dProblem p = problems::conv2d(c, nhwc, false);
        p.dtype = dtype, p.allow_tf32 = i % 5 == 4;
        const Inputs<Conv2dProblem> in(p, {flush, Values::integers});
        const Data grad(dtype, extent(p).output, flush, Values::integers, 8);
        const int64_t channels = p.in_channels / p.groups, kernels = p.out_channels / p.groups;
        std::vector<double> of_x(extent(p).input), of_w(extent(p).weight), of_b(p.out_channels);
        for (int64_t n = 0; n < p.batch; n++)
          for (int64_t k = 0; k < p.out_channels; k++)
            for (int64_t i = 0; i < p.out_height; i++)
              for (int64_t j = 0; j < p.out_width; j++) {
                const double g = grad.doubles[n * p.y_stride.n + k * p.y_stride.c + i * p.y_stride.h + j * p.y_stride.w];
                of_b[k] += g;
                for (int64_t d = 0; d < channels; d++)
                  for (int64_t r = 0; r < p.kernel_height; r++)
                    for (int64_t s = 0; s < p.kernel_width; s++) {
                      const int64_t h = i * p.stride_h - p.pad_h + r * p.dilation_h,
                                    v = j * p.stride_w - p.pad_w + s * p.dilation_w;
                      if (h < 0 || h >= p.in_height || v < 0 || v >= p.in_width) continue;
                      const int64_t x = n * p.x_stride.n + (k / kernels * channels + d) * p.x_stride.c + h * p.x_stride.h +
                                        v * p.x_stride.w,
                                    w = ((k * channels + d) * p.kernel_height + r) * p.kernel_width + s;
                      of_x[x] += g * in.weight.doubles[w], of_w[w] += g * in.x.doubles[x];
                    }
              }
        for (bool of_weight : {false, true}) {
          SCOPED_TRACE(std::string(name_of(dtype)) + (nhwc ? ", NHWC" : ", NCHW") + (of_weight ? ", of the weight" : ""));
          ASSERT_TRUE(has_backward(by_graph(), p, of_weight));
          const std::vector<char> got = run_backward(by_graph(), p, in, grad, of_weight, flush);
          std::vector<double> expected = of_weight ? of_w : of_x;
          if (of_weight) expected.insert(expected.end(), of_b.begin(), of_b.end());
          ASSERT_EQ(got.size(), expected.size() * size_of(dtype));
          for (size_t i = 0; i < expected.size(); i++) {
            double rounded = 0;
            with_type(dtype, [&]<class T>() { rounded = widen(narrowed<T>(static_cast<Acc<T>>(expected[i]))); });
            ASSERT_EQ(get(dtype, got.data(), i), rounded) << "element " << i;
          }
        }
      }
  const Engines none{{.has_gradients = false}};
  const GradientNames names = by_graph().traits.gradients(dnn_problem(211));
  EXPECT_STREQ(names.input, "im2col");
  EXPECT_STREQ(names.weight, "im2col");
  const Capability no_gpu(0);
  EXPECT_STREQ(by_graph().traits.gradients(dnn_problem(212)).input, "cudnn") << "cuDNN is not asked";
}

TEST(CudnnGraph, APlanIsMadeOnceForEachThreadDeviceAndAlignment) {
  const Conv2dProblem p = dnn_problem(201);
  std::thread([&] {
    const int64_t before = fake::dnn_plans_made;
    for (int i = 0; i < 3; i++)
      for (bool aligned : {true, false}) expect_exact_by_graph(p, aligned);
    EXPECT_EQ(fake::dnn_plans_made - before, 2) << "cuDNN does not let threads share a plan";
    fake::device = 1;
    expect_exact_by_graph(p, true);
    EXPECT_EQ(fake::dnn_device_used, 1);
    EXPECT_EQ(fake::dnn_plans_made - before, 4);
    fake::device = 0;
    Conv2dProblem other = p;
    other.has_bias = false;
    expect_exact_by_graph(other, true);
    other.allow_tf32 = true;
    expect_exact_by_graph(other, true);
    EXPECT_EQ(fake::dnn_plans_made - before, 8);
  }).join();
  const int64_t made = fake::dnn_plans_made;
  for (int i = 0; i < 20; i++) std::thread([&] { expect_exact_by_graph(p, true); }).join();
  EXPECT_LE(fake::dnn_plans_made, made + 2) << "threads that have ended leave plans with their handles";
}

TEST(CudnnGraph, PlansAreBounded) {
  const int64_t before = fake::dnn_plans;
  Reason reason{};
  for (int64_t i = 0; i < 3000; i++) ASSERT_TRUE(by_graph().traits.supports(dnn_problem(5000 + i), reason)) << reason.text;
  EXPECT_LE(fake::dnn_plans, std::max<int64_t>(before, 1024) + 1);
}

TEST(CudnnGraph, RunsOnTheCallsStreamAndMayBeCapturedFirst) {
  const Conv2dProblem p = dnn_problem(202);
  const Inputs<Conv2dProblem> in(p, {Flush::begin, Values::integers});
  const Guarded y(extent(p).output * 4, Flush::begin), scratch(256, Flush::begin);
  fake::capturing = true;
  for (void* stream : {static_cast<void*>(y.as<char>()), static_cast<void*>(nullptr)}) {
    ASSERT_EQ(by_graph().traits.workspace(p), 256);
    Workspace workspace{scratch.as<char>(), 256, 0, stream};
    by_graph().run(p, {in.x.stored(), in.weight.stored(), in.bias.stored(), nullptr, y.as<char>()}, workspace);
    EXPECT_EQ(fake::dnn_stream_used, stream);
    EXPECT_EQ(fake::capture_mode, cudaStreamCaptureModeGlobal) << "the thread is left in another mode";
  }
  fake::capturing = false;
}

TEST(CudnnGraph, RefusalsAreInItsOwnWordsAndErrorsAreNone) {
  Reason reason{};
  auto refusal = [&](int64_t height) {
    EXPECT_FALSE(by_graph().traits.supports(dnn_problem(height), reason));
    return std::string(reason.text);
  };
  {
    const Engines none{{.numerical = {CUDNN_NUMERICAL_NOTE_FFT}},
                       {.numerical = {CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION}}};
    EXPECT_EQ(refusal(203), "has no precompiled engine of cuDNN's that computes this as it is asked for");
  }
  {
    const Engines refusing{{.adds_bias = false}, {.status = CUDNN_STATUS_NOT_SUPPORTED_LAYOUT}};
    EXPECT_EQ(refusal(204), "cuDNN refuses: CUDNN_STATUS_NOT_SUPPORTED_LAYOUT: this engine");
  }
  {
    const Engines broken{{.status = CUDNN_STATUS_NOT_SUPPORTED_SUBLIBRARY_UNAVAILABLE}};
    EXPECT_THROW(by_graph().traits.supports(dnn_problem(205), reason), std::runtime_error);
  }
  fake::dnn_answer = CUDNN_STATUS_NOT_SUPPORTED;
  EXPECT_EQ(refusal(206), "cuDNN refuses: CUDNN_STATUS_NOT_SUPPORTED: for a test");
  fake::dnn_answer = CUDNN_STATUS_BAD_PARAM;
  EXPECT_THROW(by_graph().traits.supports(dnn_problem(207), reason), std::runtime_error);
  fake::dnn_answer = CUDNN_STATUS_SUCCESS;
  EXPECT_FALSE(by_graph().traits.supports(dnn_problem(206), reason)) << "a refusal is asked for once";
  EXPECT_TRUE(by_graph().traits.supports(dnn_problem(205), reason)) << "an error is kept";
  EXPECT_EQ(refusal(int64_t{1} << 31), "cuDNN takes sizes and strides below 2147483648, got 25769803776");
  // Memory that no engine reads is known only when the plan runs.
  const Engines aligned{{.alignment = 16}};
  EXPECT_TRUE(by_graph().traits.supports(dnn_problem(209), reason)) << reason.text;
  try {
    expect_exact_by_graph(dnn_problem(209), false);
    ADD_FAILURE() << "no error";
  } catch (const std::runtime_error& e) {
    EXPECT_STREQ(e.what(), "cuDNN refuses: CUDNN_STATUS_NOT_SUPPORTED: this alignment");
  }
}

TEST(CudnnGraph, FiltersOfTensorCoresAreKrscBesideChannelsLast) {
  for (bool nhwc : {false, true})
    for (bool allow_tf32 : {false, true})
      for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
        Conv2dProblem p = problems::conv2d({1, 6, 5, 7, 4, 3, 2, 1, 1, 1, 1, 1, 1, 2}, nhwc, true);
        p.dtype = dtype, p.allow_tf32 = allow_tf32;
        const bool krsc = nhwc && (size_of(dtype) == 2 || (dtype == DType::f32 && allow_tf32));
        EXPECT_EQ(by_graph().traits.packed_bytes(p), krsc ? round_up(4 * 3 * 3 * 2 * size_of(dtype), 256) : 0);
        expect_exact_by_graph(p, true);
        EXPECT_EQ(fake::dnn_format_used == CUDNN_TENSOR_NHWC, krsc) << name_of(dtype);
      }
}

// What cuDNN's heuristic says first of what can run is what runs, under its name.
TEST(Cudnn, AGuessIsTheFirstOfItsHeuristicThatIsUsable) {
  const auto& guess = on_cuda<Conv2dProblem>("conv2d", "guess");
  const Candidates<Conv2dProblem> all{nullptr,
                                      [](const void*, const Conv2dProblem& p, const char* name) {
                                        const AlgorithmInfo* info = algorithm("cuda", "conv2d", name);
                                        Reason ignored;
                                        return info &&
                                               supported(*reinterpret_cast<const Algorithm<Conv2dProblem>*>(info), p, ignored);
                                      },
                                      nullptr};
  Conv2dProblem p = problems::conv2d({1, 4, 9, 11, 4, 3, 3, 2, 2, 1, 1, 1, 1, 1}, false, true);
  const auto ranking = fake::dnn_ranking;
  fake::dnn_ranking = {{CUDNN_CONVOLUTION_FWD_ALGO_WINOGRAD_NONFUSED, CUDNN_STATUS_NOT_SUPPORTED},
                       {CUDNN_CONVOLUTION_FWD_ALGO_FFT, CUDNN_STATUS_SUCCESS},
                       {CUDNN_CONVOLUTION_FWD_ALGO_GEMM, CUDNN_STATUS_SUCCESS},
                       {CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM, CUDNN_STATUS_SUCCESS}};
  EXPECT_STREQ(guess.traits.choose(p, all).algorithm, "gemm") << "fft does not stride";
  p.dtype = DType::f16;
  EXPECT_STREQ(guess.traits.choose(p, all).algorithm, "implicit_precomp_gemm") << "gemm would round before the bias";
  fake::dnn_ranking.resize(3);
  EXPECT_EQ(guess.traits.choose(p, all).algorithm, nullptr);
  fake::dnn_ranking = ranking;
  p.batch = -1;
  EXPECT_STREQ(guess.traits.choose(p, all).algorithm, "implicit_gemm") << "cuDNN is not asked about unknown sizes";
  p.batch = 1;
  const Capability none(0);
  EXPECT_STREQ(guess.traits.choose(p, all).algorithm, "implicit_gemm") << "nor without a GPU";
}

// PyTorch's own operators for gradients read the process's switches, not the call's.
TEST(Cuda, GradientsAreComputedByWhatGetsTheCallsSwitches) {
  each_kernel([&]<class P>(const Algorithm<P>& a) {
    if (std::string(a.info.level) != "cuda") return;
    if constexpr (requires(P p) { p.allow_tf32; }) {
      ASSERT_TRUE(a.traits.gradients) << test_name(a);
      const P p = problems::all(static_cast<P*>(nullptr), a.info.operation)[0];
      const GradientNames names = a.traits.gradients(p);
      for (const char* name : {names.input, names.weight}) {
        ASSERT_TRUE(name) << test_name(a);
        EXPECT_TRUE(algorithm("cuda", a.info.operation, name)) << test_name(a) << ": " << name;
      }
    }
  });
}

TEST(Cuda, CublasGetsAsMuchWorkspaceAsPyTorchGivesIt) {
  const auto& gemm = on_cuda<LinearProblem>("linear", "gemm");
  const LinearProblem p{};
  auto bytes = [&](const char* config, int capability) {
    const Capability set(capability);
    config ? setenv("CUBLAS_WORKSPACE_CONFIG", config, 1) : unsetenv("CUBLAS_WORKSPACE_CONFIG");
    const int64_t result = gemm.traits.workspace(p);
    setenv("CUBLAS_WORKSPACE_CONFIG", ":1:1", 1);
    return result;
  };
  EXPECT_EQ(bytes(nullptr, 80), (4096 * 2 + 16 * 8) << 10);
  EXPECT_EQ(bytes(nullptr, 90), 32 << 20);
  EXPECT_EQ(bytes(":4096:2:16:8", 90), (4096 * 2 + 16 * 8) << 10);
  EXPECT_EQ(bytes(":16:8", 90), 16 * 8 << 10);
  for (const char* nonsense : {"", "16:8", ":16", ":a:b", ":-1:3"}) EXPECT_EQ(bytes(nonsense, 90), 32 << 20) << nonsense;
}

TEST(Cudnn, WithoutAGpuItIsListedAndNotAsked) {
  const Capability none(0);
  const int64_t before = fake::dnn_queries;
  Reason reason{};
  EXPECT_TRUE(precomp().traits.supports(dnn_problem(107), reason)) << reason.text;
  EXPECT_THROW(precomp().traits.workspace(dnn_problem(107)), std::runtime_error);
  EXPECT_EQ(fake::dnn_queries, before);
}

}  // namespace
