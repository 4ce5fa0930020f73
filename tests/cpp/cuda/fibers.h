// The threads of a CUDA block as fibers of one host thread, so that barriers and warp shuffles work as on a GPU. A fiber runs one
// thread after the other until one waits; then it keeps that thread's stack, and another fiber goes on with the rest. Kernels
// without barriers so cost no more than a loop. Threads start, and waiting ones go on, in an order that is drawn anew for every
// seed: what is right only in some order shows.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <vector>
#if defined(__SANITIZE_ADDRESS__)
extern "C" {
void __sanitizer_start_switch_fiber(void** save, const void* bottom, size_t size);
void __sanitizer_finish_switch_fiber(void* save, const void** bottom, size_t* size);
}
#endif

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
inline thread_local dim3 gridDim, blockDim, blockIdx, threadIdx;

namespace fake {

inline thread_local unsigned seed = 0;  // of the order; 0: by number, and whoever waited longest goes on
inline thread_local int64_t barriers = 0;

class Block {
 public:
  enum class State { idle, ready, at_barrier, at_warp };
  static constexpr unsigned kWarp = 32;

  // False where some threads wait for others that never come.
  static bool run(unsigned threads, const std::function<void()>& thread) {
    static thread_local Block block;
    return block.run_all(threads, thread);
  }
  static Block& current() { return *running(); }

  // From a thread of a kernel: waits for the whole block, or for the lanes of the thread's warp that `lanes` has.
  void wait(State state, uint32_t lanes) {
    Fiber& me = *fibers_[now_];
    me.state = state, me.lanes = lanes;
    barriers++;
    leave(me);
    threadIdx.x = me.thread;
  }
  // The value that another lane of the warp gives to the same call.
  template <class T>
  T exchange(uint32_t lanes, T value, unsigned lane) {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    const unsigned me = threadIdx.x;
    std::memcpy(&slots_[me], &value, sizeof(T));
    wait(State::at_warp, lanes);
    std::memcpy(&value, &slots_[me / kWarp * kWarp + lane % kWarp], sizeof(T));
    wait(State::at_warp, lanes);  // before a later call writes the slots
    return value;
  }

 private:
  struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    State state = State::idle;
    unsigned thread = 0;
    uint32_t lanes = 0;
    void* shadow = nullptr;
  };
  static constexpr size_t kStack = 128 << 10;

  static Block*& running() {
    static thread_local Block* block = nullptr;
    return block;
  }
  static void main() {
    Block& b = current();
    b.arrived(*b.fibers_[b.now_]);
    for (;;) {
      Fiber& me = *b.fibers_[b.now_];
      if (b.started_ == b.order_.size()) {
        me.state = State::idle;
        b.leave(me);
        continue;
      }
      me.thread = threadIdx.x = b.order_[b.started_++];
      (*b.body_)();
      b.done_++;
    }
  }
  void arrived([[maybe_unused]] Fiber& me) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(me.shadow, &scheduler_stack_, &scheduler_size_);
#endif
  }
  void leave(Fiber& me) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&me.shadow, scheduler_stack_, scheduler_size_);
#endif
    swapcontext(&me.context, &scheduler_);
    arrived(me);
  }
  void enter(size_t i) {
    Fiber& fiber = *fibers_[i];
    now_ = i, fiber.state = State::ready;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&scheduler_shadow_, fiber.stack.get(), kStack);
#endif
    swapcontext(&scheduler_, &fiber.context);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(scheduler_shadow_, nullptr, nullptr);
#endif
  }
  size_t idle_fiber() {
    for (size_t i = 0; i < fibers_.size(); i++)
      if (fibers_[i]->state == State::idle) return i;
    auto fiber = std::make_unique<Fiber>();
    fiber->stack = std::make_unique<char[]>(kStack);
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = fiber->stack.get(), fiber->context.uc_stack.ss_size = kStack;
    fiber->context.uc_link = nullptr;
    makecontext(&fiber->context, main, 0);
    fibers_.push_back(std::move(fiber));
    return fibers_.size() - 1;
  }

  bool run_all(unsigned threads, const std::function<void()>& body) {
    body_ = &body, started_ = 0, done_ = 0;
    order_.resize(threads), slots_.resize(threads);
    std::iota(order_.begin(), order_.end(), 0u);
    random_.seed(seed);
    if (seed) std::shuffle(order_.begin(), order_.end(), random_);
    running() = this;
    while (done_ < threads) {
      ready_.clear();
      for (size_t i = 0; i < fibers_.size(); i++)
        if (fibers_[i]->state == State::ready) ready_.push_back(i);
      // A thread that has not begun is one more that could run next.
      const size_t choices = ready_.size() + (started_ < threads);
      if (choices > 0) {
        const size_t choice = seed ? random_() % choices : 0;
        enter(choice < ready_.size() ? ready_[choice] : idle_fiber());
      } else if (!free_waiting(threads)) {
        fibers_.clear();  // with the stacks of those that wait
        running() = nullptr;
        return false;
      }
    }
    running() = nullptr;
    return true;
  }
  // Lets those go on whose barrier is complete: of the block when every thread waits there, of a warp when its lanes do. A
  // thread that has ended is missed.
  bool free_waiting(unsigned threads) {
    unsigned at_barrier = 0;
    std::vector<uint32_t> here((threads + kWarp - 1) / kWarp), wanted(here.size());
    for (const auto& fiber : fibers_) {
      at_barrier += fiber->state == State::at_barrier;
      if (fiber->state != State::at_warp) continue;
      here[fiber->thread / kWarp] |= 1u << fiber->thread % kWarp, wanted[fiber->thread / kWarp] |= fiber->lanes;
    }
    bool freed = false;
    for (const auto& fiber : fibers_) {
      const size_t warp = fiber->thread / kWarp;
      if ((fiber->state == State::at_barrier && at_barrier == threads) ||
          (fiber->state == State::at_warp && here[warp] == wanted[warp]))
        fiber->state = State::ready, freed = true;
    }
    return freed;
  }

  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<unsigned> order_;
  std::vector<size_t> ready_;
  std::vector<uint64_t> slots_;
  const std::function<void()>* body_ = nullptr;
  size_t started_ = 0, done_ = 0, now_ = 0;
  std::mt19937 random_;
  ucontext_t scheduler_;
  const void* scheduler_stack_ = nullptr;
  size_t scheduler_size_ = 0;
  void* scheduler_shadow_ = nullptr;
};

}  // namespace fake

inline void __syncthreads() { fake::Block::current().wait(fake::Block::State::at_barrier, 0); }
inline void __syncwarp(uint32_t lanes = ~0u) { fake::Block::current().wait(fake::Block::State::at_warp, lanes); }
template <class T>
T __shfl_sync(uint32_t lanes, T value, unsigned lane) {
  return fake::Block::current().exchange(lanes, value, lane);
}
template <class T>
T __shfl_xor_sync(uint32_t lanes, T value, unsigned mask) {
  return fake::Block::current().exchange(lanes, value, threadIdx.x ^ mask);
}
