#include "emulator/fibers.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "emulator/mbarrier.h"

// Saves what a call must leave alone on the stack of `from`, and goes on with `to`.
extern "C" void distmk_switch(void** from, void* to);
#if defined(__x86_64__)
asm(R"(
.text
.globl distmk_switch
distmk_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");
constexpr uint32_t SAVED_WORDS = 6;
#else
#error "the emulator's fibers are written for x86-64"
#endif

namespace distmk {
namespace emulator {
namespace {

constexpr size_t STACK_BYTES = 48 << 10;
void* main_stack;
Fiber* running;
const std::function<void()>* entry;

void start() {
  (*entry)();
  running->done = true;
  --running->block->running;
  distmk_switch(&running->stack_pointer, main_stack);
}

void prepare(Fiber& fiber) {
  fiber.stack = std::make_unique<char[]>(STACK_BYTES);
  auto top = reinterpret_cast<uintptr_t>(fiber.stack.get() + STACK_BYTES) & ~uintptr_t{15};
  auto* words = reinterpret_cast<void**>(top) - 2;  // as after a call: aligned to 16, less a return address
  *words = reinterpret_cast<void*>(&start);
  words -= SAVED_WORDS;
  memset(words, 0, SAVED_WORDS * sizeof(void*));
  fiber.stack_pointer = words;
}

// Some copies land, in any order.
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

void report_deadlock(const std::vector<std::unique_ptr<Fiber>>& fibers) {
  fprintf(stderr, "emulator: all threads wait for each other\n");
  for (const auto& fiber : fibers) {
    if (fiber->done || fiber->thread % WARP) continue;
    const Block& block = *fiber->block;
    const auto* at = reinterpret_cast<const char*>(fiber->met);
    const char* what = at == reinterpret_cast<const char*>(&block.all.count)    ? "__syncthreads"
                       : at == reinterpret_cast<const char*>(&block.some.count) ? "barrier_sync"
                                                                                : "its warp or an mbarrier";
    fprintf(stderr, "  block %u warp %u: %s, at shared %ld\n", block.index, fiber->thread / WARP, what,
            static_cast<long>(at - block.shared));
  }
  abort();
}

}  // namespace

Fiber& current() { return *running; }

void yield() { distmk_switch(&running->stack_pointer, main_stack); }

void meet(Meeting& meeting, uint32_t expected, const char* what, const std::function<void()>& work) {
  if (meeting.arrived && strcmp(meeting.what, what)) {
    fprintf(stderr, "emulator: block %u thread %u is at %s, others of its warp or block at %s\n", running->block->index,
            running->thread, what, meeting.what);
    abort();
  }
  meeting.what = what;
  if (++meeting.arrived == expected) {
    if (work) work();
    meeting.arrived = 0;
    ++meeting.count;
    return;
  }
  running->met = &meeting.count;
  running->seen = meeting.count;
  yield();
}

uint64_t* operands_of(uint32_t lane) {
  return &running->block->operands[(running->thread / WARP * WARP + lane) * WORDS];
}
uint64_t* operands() { return operands_of(running->thread % WARP); }
void meet_warp(const char* what, const std::function<void()>& work) {
  meet(running->block->warps[running->thread / WARP], WARP, what, work);
}

void run_grid(uint32_t num_blocks, uint32_t num_threads, size_t shared_bytes, uint64_t seed,
              const std::function<void()>& kernel) {
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::mt19937_64 random(seed);
  entry = &kernel;
  constexpr uint64_t PASSES = 500;
  uint64_t passes = 0;
  std::vector<uint32_t> paces(num_blocks * num_threads / WARP);
  for (uint32_t b = 0; b < num_blocks; ++b) {
    auto block = std::make_unique<Block>();
    block->index = b;
    block->memory.resize(shared_bytes + 1024);
    block->shared =
        reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(block->memory.data()) + 1023) & ~uintptr_t{1023});
    memset(block->shared, 0xff, shared_bytes);
    block->warps.resize(num_threads / WARP);
    block->operands.resize(num_threads * WORDS);
    block->running = num_threads;
    for (uint32_t t = 0; t < num_threads; ++t) {
      auto fiber = std::make_unique<Fiber>();
      fiber->block = block.get();
      fiber->thread = t;
      prepare(*fiber);
      fibers.push_back(std::move(fiber));
    }
    blocks.push_back(std::move(block));
  }
  for (uint64_t left = fibers.size(), resumed = 1; left;) {
    if (!resumed) report_deadlock(fibers);
    resumed = 0;
    if (passes++ % PASSES == 0)
      for (uint32_t& pace : paces) pace = random() % 4 ? 0 : static_cast<uint32_t>(random() % 64);
    for (auto& fiber : fibers) {
      if (fiber->done || (fiber->met && *fiber->met == fiber->seen)) continue;
      // Some warps fall behind for a while.
      const uint32_t pace = paces[(fiber->block->index * num_threads + fiber->thread) / WARP];
      if (pace && passes % pace) {
        ++resumed;
        continue;
      }
      fiber->met = nullptr;
      ++resumed;
      running = fiber.get();
      distmk_switch(&main_stack, fiber->stack_pointer);
      left -= fiber->done;
    }
    for (auto& block : blocks) {
      resumed += block->copies.size();
      land(*block, random, !block->running);
    }
  }
}

}  // namespace emulator
}  // namespace distmk
