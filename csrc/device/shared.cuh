// A worker CTA's shared memory.
#pragma once
#include "device/ring.cuh"
#include "device/task_source.cuh"
#include "runtime/worker.h"

namespace distmk {

constexpr uint32_t NUM_WARPS = NUM_CONSUMERS / 32;
constexpr uint32_t TILE_TOKENS = 8;   // columns of a product on tensor cores
constexpr uint32_t SUMS_STRIDE = 68;  // of a warp's sums for a token: a round's rows, and room to lie in other banks
constexpr uint32_t SCRATCH_BYTES = NUM_WARPS * TILE_TOKENS * SUMS_STRIDE * sizeof(float);
constexpr uint32_t WORK_BYTES = 8192;  // of attention, with the scratch behind it, and of the head's candidates
static_assert(SUMS_STRIDE >= ROUND_ROWS, "");
static_assert(2 * TILE_TOKENS >= MAX_ROWS, "two tiles hold all rows");
constexpr uint32_t NEAR_RING_ENTRIES = 32;

// What the warps tell each other about a task: the waiter the consumers that it is announced, while the one before runs
// where that can be, and that its waits are met; the consumers the clerk that its body is done; the clerk the waiter
// that its triggers were fired.
struct Handoff {
  uint64_t announced[2], ready[2], done[2], fired[2];
  Action action[2];
  uint64_t pushed[2];    // ranks whose triggers the body has fired itself
  uint64_t ready_ns[2];  // where the launch is traced
  Flag over_at;          // number of a task that was announced and will never be ready, as the launch is over

  DISTMK_FN void init() {
    for (uint32_t i = 0; i < 2; ++i) {
      barrier_init(&announced[i], WARP_ARRIVALS);
      barrier_init(&ready[i], WARP_ARRIVALS);
      barrier_init(&done[i], NUM_WARPS * WARP_ARRIVALS);
      barrier_init(&fired[i], WARP_ARRIVALS);
    }
    over_at = {~0u};
  }
  DISTMK_FN void announce(const Team& team, uint32_t n, const Action& what) {
    if (team.leader()) action[n % 2] = what;
    warp_arrive(&announced[n % 2]);
  }
  // By the consumers: task `n` is ready, and all warps have left the one before, so what it had in shared memory is
  // free. False: the launch is over.
  DISTMK_FN bool wait_until_ready(uint32_t n, bool traced) {
    barrier_wait(&ready[n % 2], n / 2 % 2);
    if (over_at.get() == n) return false;  // by now it may be over for the next task
    await_last(n);
    if (traced) keep_time(n);
    return true;
  }
  DISTMK_FN void await_last(uint32_t n) {
    if (n) barrier_wait(&done[(n - 1) % 2], (n - 1) / 2 % 2);
  }
  DISTMK_FN void keep_time(uint32_t n) {
    if (threadIdx.x == 0) ready_ns[n % 2] = now_ns();
  }
};

// Two buffers for the sums of the warps: one is written while the other is added up.
struct SumsBuffers {
  static constexpr uint32_t COUNT = 2;
  uint64_t full[COUNT], empty[COUNT];

  DISTMK_FN void init() {
    for (uint32_t i = 0; i < COUNT; ++i) {
      barrier_init(&full[i], NUM_WARPS * WARP_ARRIVALS);
      barrier_init(&empty[i], NUM_WARPS * WARP_ARRIVALS);
    }
  }
};

// Where a consumer warp is in what it shares with others; it goes through tasks at its own pace.
struct Places {
  RingPlace<NUM_STAGES> stage;
  RingPlace<SumsBuffers::COUNT> sums;
  uint32_t num_slabs = 0;  // that it has drained
};

struct NearRing {
  JitRing ring;
  JitEntry entries[NEAR_RING_ENTRIES];
};

constexpr uint32_t NEAR_RANKS = 8;  // whose candidates the batcher has at hand; those of more are read where they lie

struct PrepareCopies {
  alignas(16) BatcherState state;
  alignas(16) Batch batch;
  Candidate candidates[NEAR_RANKS * MAX_ROWS];
};

struct Shared {
  char slots[NUM_STAGES * STAGE_BYTES];  // first: stages must be aligned
  char work[WORK_BYTES];
  char scratch[SCRATCH_BYTES];
  float squares[MAX_ROWS][NUM_WARPS];  // of the activations, for their norm
  Ring ring;
  SumsBuffers sums;
  Places places[NUM_WARPS];
  TaskRing tasks;
  TaskSlot handed_out[2], scheduled[2];
  Handoff handoff;
  NearRing near_ring;
  alignas(16) Batch batch;
  uint64_t num_batches;  // see RankState::num_near_batches
  PrepareCopies prepare;
  alignas(16) char state_memory[sizeof(RankState)];
  alignas(16) char far_memory[16];  // of FarRanks
  LaunchParams params;
  ProgramHeader header;
  uint64_t heap_bases[MAX_RANKS];
};

constexpr uint32_t MAX_SHARED_BYTES = 232448;  // of a block, compute capability 9.0 and 10.0
static_assert(sizeof(Shared) <= MAX_SHARED_BYTES, "a worker's shared memory does not fit");

#ifndef DISTMK_EMULATED
extern __shared__ __align__(1024) char shared_memory[];
#endif
DISTMK_FN Shared& shared() { return *reinterpret_cast<Shared*>(shared_memory); }

DISTMK_FN bool StartSignal::wait() const {
  return number == NONE || shared().handoff.wait_until_ready(number, shared().params.trace_capacity);
}
DISTMK_FN bool StartSignal::confirm() const {
  return number == NONE || shared().handoff.wait_until_ready(number, false);
}
DISTMK_FN void StartSignal::await_last() const {
  if (number != NONE) shared().handoff.await_last(number);
}
DISTMK_FN bool StartSignal::given() const {
  return number == NONE || barrier_test(&shared().handoff.ready[number % 2], number / 2 % 2);
}
DISTMK_FN void StartSignal::keep_time() const {
  if (number != NONE && shared().params.trace_capacity) shared().handoff.keep_time(number);
}

}  // namespace distmk
