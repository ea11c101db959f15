// A GPU's threads on one thread of a CPU: every one a fiber, which goes on until it waits. What the lanes of a warp do
// together they meet for; that they meet for the same thing is checked.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "emulator/watch.h"

namespace distmk {
namespace emulator {

constexpr uint32_t WARP = 32;

// Where lanes or threads meet: the last to come does the work, and all go on.
struct Meeting {
  const char* what = nullptr;
  uint32_t lamport_value = 0;
  uint64_t count = 0;  // of times they have met
};

struct Copy {  // to shared memory, on its way
  char* dst;
  const char* src;
  uint32_t num_bytes;
  uint64_t* full;
};

struct Block {
  uint32_t index;
  std::vector<char> memory;  // shared
  char* shared;              // in it, aligned
  Meeting all, some;         // __syncthreads, barrier_sync
  std::vector<Meeting> warps;
  std::vector<uint64_t> operands;  // of a warp's meeting: WORDS a lane
  std::vector<Copy> copies;
  uint32_t running = 0;
};

constexpr uint32_t WORDS = 8;

struct Fiber {
  void* watched = nullptr;  // what ThreadSanitizer knows it by
  void* stack_pointer = nullptr;
  std::unique_ptr<char[]> stack;
  Block* block = nullptr;
  uint32_t thread = 0;
  const uint64_t* met = nullptr;  // a meeting's count or an mbarrier: goes on once this differs from `seen`
  uint64_t seen = 0;
  bool done = false;
};

Fiber& current();
void yield();
void await_change(const uint64_t* at);  // may come back sooner
// Waits for `expected` threads of the meeting; `work` is done by the last. A meeting without work orders memory: what
// each has done before it comes before what any does after it.
void meet(Meeting& meeting, uint32_t expected, const char* what, const std::function<void()>& work = {});
// This lane's operands, and lane i's.
uint64_t* operands();
uint64_t* operands_of(uint32_t lane);
void meet_warp(const char* what, const std::function<void()>& work);

// Runs `kernel` by all threads of all blocks; `seed` chooses when copies land.
void run_grid(uint32_t num_blocks, uint32_t num_threads, size_t shared_bytes, uint64_t seed,
              const std::function<void()>& kernel);

}  // namespace emulator
}  // namespace distmk
