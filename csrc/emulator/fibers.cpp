// Switching between fibers, their scheduler with its random timing, and meetings (fibers.h).
#include "emulator/fibers.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "emulator/mbarrier.h"

// Saves the callee-saved registers on the current stack, stores its pointer in *from and continues on the stack `to`.
// It continues by a jump: processors predict that a `ret` returns to its call, and this one never does.
extern "C" void distmk_switch(void** from, void* to);
#if defined(__x86_64__)
asm(R"(
.text
.globl distmk_switch
distmk_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp; popq %rcx
  jmp *%rcx
)");
constexpr uint32_t SAVED_WORDS = 6;
#else
#error "the emulator's fibers are written for x86-64"
#endif

namespace distmk {
namespace emulator {
namespace {

constexpr size_t STACK_BYTES = WATCHED ? 256 << 10 : 48 << 10;
constexpr size_t LINE_BYTES = 64, PAGE_BYTES = 4096;
// State of the GPU that this CPU thread emulates.
thread_local void* main_stack;
thread_local void* main_watched;
thread_local const std::function<void()>* entry;
thread_local size_t num_left;  // fibers that are not done

bool waits(const Fiber& fiber) { return fiber.done || (fiber.met && *fiber.met == fiber.seen); }

// Continues `fiber`, or the scheduler of run_grid() if it is null. Returns once somebody continues the caller.
void go_on(Fiber* fiber, void** from) {
  if (fiber) {
    fiber->met = nullptr;
    running = fiber;
  }
  watch_next(fiber ? fiber->watched : main_watched);
  distmk_switch(from, fiber ? fiber->stack_pointer : main_stack);
}

// Switches to the next lane of the warp that need not wait or, past the last lane, to the scheduler.
void leave() {
  Fiber* const mine = running;
  Fiber* const end = mine + (WARP - mine->thread % WARP);
  Fiber* next = mine + 1;
  while (next != end && waits(*next)) ++next;
  go_on(next == end ? nullptr : next, &mine->stack_pointer);
}

void start() {
  (*entry)();
  {
    const Unwatched here;
    running->done = true;
    --running->block->running;
    --num_left;
  }
  release_order(running->block);
  go_on(nullptr, &running->stack_pointer);
}

void prepare(Fiber& fiber) {
  // If all stacks ended at the same place in a page, they would share a few lines of the processor's cache.
  const size_t color = fiber.thread * LINE_BYTES % PAGE_BYTES;
  fiber.stack.reset(new char[STACK_BYTES + PAGE_BYTES]);  // not zeroed
  auto top = reinterpret_cast<uintptr_t>(fiber.stack.get() + STACK_BYTES + color) & ~uintptr_t{15};
  auto* words = reinterpret_cast<void**>(top) - 2;  // as after a call: 16-byte aligned, less a return address
  *words = reinterpret_cast<void*>(&start);
  words -= SAVED_WORDS;
  memset(words, 0, SAVED_WORDS * sizeof(void*));
  fiber.stack_pointer = words;
}

// Lets some copies land, in any order, or all of them if `all`.
void land(Block& block, std::mt19937_64& random, bool all) {
  for (size_t i = 0; i < block.copies.size();) {
    if (!all && random() % 4) {
      ++i;
      continue;
    }
    const Copy copy = block.copies[i];
    memcpy(copy.dst, copy.src, copy.num_bytes);
    mbarrier_complete(copy.full, copy.num_bytes);
    block.copies[i] = block.copies.back();
    block.copies.pop_back();
  }
}

// Prints what a blocked thread waits for.
void report_wait(const Fiber& fiber) {
  const Block& block = *fiber.block;
  const uint32_t warp = fiber.thread / WARP;
  fprintf(stderr, "  block %u warp %u: ", block.index, warp);
  for (const Meeting* meeting : {&block.all, &block.some, &block.warps[warp]})
    if (fiber.met == &meeting->count) {
      fprintf(stderr, "%s\n", meeting->what);
      return;
    }
  fprintf(stderr, "an mbarrier at shared %td\n", reinterpret_cast<const char*>(fiber.met) - block.shared);
}

[[noreturn]] void report_deadlock(const std::vector<Fiber>& fibers) {
  fprintf(stderr, "emulator: all threads wait for each other\n");
  for (const Fiber& fiber : fibers)
    if (!fiber.done && fiber.thread % WARP == 0) report_wait(fiber);
  abort();
}

std::unique_ptr<Block> make_block(uint32_t index, uint32_t num_threads, size_t shared_bytes) {
  auto block = std::make_unique<Block>();
  block->index = index;
  block->memory.resize(shared_bytes + 1024);
  block->shared =
      reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(block->memory.data()) + 1023) & ~uintptr_t{1023});
  memset(block->shared, 0xff, shared_bytes);
  block->warps.resize(num_threads / WARP);
  block->operands.resize(num_threads * WORDS);
  block->running = num_threads;
  return block;
}

Fiber make_fiber(Block* block, uint32_t thread) {
  Fiber fiber;
  fiber.block = block;
  fiber.thread = thread;
  fiber.watched = watch_thread();
  prepare(fiber);
  return fiber;
}

// What all threads of a warp wait for, if it is one thing, so that a pass checks it once.
struct WarpWait {
  const uint64_t* met = nullptr;  // null: they wait for different things, or some need not wait
  uint64_t seen = 0;

  bool holds() const { return met && *met == seen; }

  void note(const Fiber* lanes) {
    static constexpr uint64_t NEVER = 0;
    met = &NEVER;
    seen = NEVER;
    for (const Fiber* lane = lanes; lane < lanes + WARP; ++lane) {
      if (lane->done) continue;
      if (met == &NEVER) {
        met = lane->met;
        seen = lane->seen;
      }
      if (!lane->met || lane->met != met || lane->seen != seen) {
        met = nullptr;
        return;
      }
    }
  }
};

// How much each warp is slowed: with pace n it runs only in every n-th pass over all threads. Paces are drawn anew
// every LASTING_PASSES passes, and most warps are not slowed.
class Paces {
 public:
  explicit Paces(size_t num_warps) : paces_(num_warps) {}

  void next_pass(std::mt19937_64& random) {
    if (pass_++ % LASTING_PASSES == 0)
      for (uint32_t& pace : paces_) pace = random() % 4 ? 0 : static_cast<uint32_t>(random() % 64);
  }
  bool runs(size_t warp) const { return !paces_[warp] || pass_ % paces_[warp] == 0; }

 private:
  static constexpr uint64_t LASTING_PASSES = 500;
  std::vector<uint32_t> paces_;
  uint64_t pass_ = 0;
};

}  // namespace

__thread Fiber* running;

void yield() {
  const Unwatched here;
  leave();
}

void await_change(const uint64_t* at) {
  const Unwatched here;
  running->met = at;
  running->seen = *at;
  leave();
}

void meet(Meeting& meeting, uint32_t expected, const char* what, void (*work)()) {
  const Unwatched here;
  const void* const order = order_of(&meeting.count, meeting.count);
  if (meeting.num_arrived && meeting.what != what && strcmp(meeting.what, what)) {
    fprintf(stderr, "emulator: block %u thread %u is at %s, others of its warp or block at %s\n", running->block->index,
            running->thread, what, meeting.what);
    abort();
  }
  meeting.what = what;
  if (!work) release_order(order);
  if (++meeting.num_arrived == expected) {
    if (work) work();
    meeting.num_arrived = 0;
    ++meeting.count;
  } else {
    running->met = &meeting.count;
    running->seen = meeting.count;
    leave();
  }
  if (!work) acquire_order(order);
}

void run_grid(uint32_t num_blocks, uint32_t num_threads, size_t shared_bytes, uint64_t seed,
              const std::function<void()>& kernel) {
  const Unwatched here;
  main_watched = watched_thread();
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<Fiber> fibers;  // contiguous, because most passes only check waits
  fibers.reserve(size_t{num_blocks} * num_threads);
  for (uint32_t b = 0; b < num_blocks; ++b) {
    blocks.push_back(make_block(b, num_threads, shared_bytes));
    for (uint32_t t = 0; t < num_threads; ++t) fibers.push_back(make_fiber(blocks.back().get(), t));
  }
  entry = &kernel;
  std::mt19937_64 random(seed);
  for (Fiber& fiber : fibers) fiber.timing.seed(static_cast<uint32_t>(random()));
  Paces paces(fibers.size() / WARP);
  std::vector<WarpWait> warp_waits(fibers.size() / WARP);
  num_left = fibers.size();
  for (size_t num_runnable = 1; num_left;) {
    if (!num_runnable) report_deadlock(fibers);
    num_runnable = 0;
    paces.next_pass(random);
    for (size_t w = 0; w < warp_waits.size(); ++w) {
      if (warp_waits[w].holds()) continue;
      const bool runs = paces.runs(w);
      Fiber* const lanes = &fibers[w * WARP];
      for (Fiber* lane = lanes; (lane = std::find_if_not(lane, lanes + WARP, waits)) != lanes + WARP; ++lane) {
        ++num_runnable;
        if (!runs) break;
        go_on(lane, &main_stack);
        lane = running;  // the last lane that ran: each switches to the next
      }
      if (runs) warp_waits[w].note(lanes);
    }
    for (auto& block : blocks) {
      num_runnable += block->copies.size();
      land(*block, random, !block->running);
    }
  }
  for (const auto& block : blocks) acquire_order(block.get());
  for (const Fiber& fiber : fibers) watch_no_more(fiber.watched);
}

}  // namespace emulator
}  // namespace distmk
