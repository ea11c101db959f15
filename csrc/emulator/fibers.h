// The threads of a GPU on one CPU thread: each is a fiber that runs until it waits. The fibers of a warp or block meet
// for a collective operation; it is an error if they meet for different operations.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "emulator/groups.h"
#include "emulator/watch.h"

namespace distmk {
namespace emulator {

constexpr uint32_t WARP = 32;

// A collective operation of the lanes of a warp or the threads of a block. The last thread to arrive does the work for
// all.
struct Meeting {
  const char* what = nullptr;
  uint32_t num_arrived = 0;
  uint64_t count = 0;  // completed meetings
};

struct Copy {  // a bulk copy to shared memory, in flight
  char* dst;
  const char* src;
  uint32_t num_bytes;
  uint64_t* full;
};

// A thread's copy of 16 bytes to shared memory, in flight; zeros if `src` is null. The source is read when the copy
// starts or, if `reads_late`, when the thread awaits it.
struct Chunk {
  char* dst;
  const char* src;
  bool reads_late;
  char content[16];
};

struct Block {
  uint32_t index;
  std::vector<char> memory;
  char* shared;       // shared memory: the aligned part of `memory`
  Meeting all, some;  // __syncthreads, barrier_sync
  std::vector<Meeting> warps;
  std::vector<uint64_t> operands;  // operands of warp meetings: WORDS per lane
  std::vector<Copy> copies;
  uint32_t running = 0;
};

constexpr uint32_t WORDS = 8;

struct Fiber {
  void* watched = nullptr;  // ThreadSanitizer's handle
  void* stack_pointer = nullptr;
  std::unique_ptr<char[]> stack;
  Block* block = nullptr;
  uint32_t thread = 0;
  const uint64_t* met = nullptr;  // a meeting's count or an mbarrier: the fiber waits until this differs from `seen`
  uint64_t seen = 0;
  Groups<Chunk> chunks;
  std::minstd_rand timing;                 // of its copies
  Groups<std::function<void()>> products;  // products that run late (emulator/products.h)
  bool done = false;
};

extern __thread Fiber* running;
inline Fiber& current() { return *running; }
void yield();
void await_change(const uint64_t* at);  // may return earlier
// Waits for `expected` threads of the meeting; the last one does `work`. A meeting without work is a barrier:
// everything that each thread did before it precedes everything that any thread does after it.
void meet(Meeting& meeting, uint32_t expected, const char* what, void (*work)() = nullptr);
// Operands of a lane of this warp, and of this lane.
inline uint64_t* operands_of(uint32_t lane) {
  return &running->block->operands[(running->thread / WARP * WARP + lane) * WORDS];
}
inline uint64_t* operands() { return operands_of(running->thread % WARP); }
inline void meet_warp(const char* what, void (*work)() = nullptr) {
  meet(running->block->warps[running->thread / WARP], WARP, what, work);
}

// Runs `kernel` on all threads of all blocks. `seed` decides when copies land and which warps fall behind.
void run_grid(uint32_t num_blocks, uint32_t num_threads, size_t shared_bytes, uint64_t seed,
              const std::function<void()>& kernel);

}  // namespace emulator
}  // namespace distmk
