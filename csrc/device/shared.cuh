// A worker CTA's shared memory.
#pragma once
#include "device/ring.cuh"
#include "device/task_source.cuh"
#include "runtime/worker.h"

namespace distmk {

constexpr uint32_t NUM_WARPS = NUM_CONSUMERS / 32;
constexpr uint32_t MAX_TILES = MAX_ROWS / 4;  // a token row takes two columns of an 8-column product: high and low half
constexpr uint32_t SCRATCH_BYTES = NUM_WARPS * ROUND_GROUPS * TILE_ROWS * MAX_ROWS * sizeof(float);
constexpr uint32_t VECTOR_BYTES = 66048;  // activations: a block of all rows, or all of fewer
constexpr uint32_t NEAR_RING_ENTRIES = 32;

// What the waiting warp tells the consumers: the next task, decided while the one before runs.
struct Handoff {
  uint64_t ready[2], done[2];
  Action action[2];

  DISTMK_FN void init() {
    for (uint32_t i = 0; i < 2; ++i) {
      barrier_init(&ready[i], 1);
      barrier_init(&done[i], NUM_WARPS);
    }
  }
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
  char vector[VECTOR_BYTES];
  char scratch[SCRATCH_BYTES];
  float squares[MAX_ROWS][NUM_WARPS];  // of the activations, for their norm
  Ring ring;
  uint32_t next_stage;  // of the launch, for the next task that drains the ring
  TaskRing tasks;
  TaskSlot handed_out[2], scheduled[2];
  Handoff handoff;
  NearRing near_ring;
  alignas(16) Batch batch;
  uint64_t num_batches;  // that have lain in `batch`
  PrepareCopies prepare;
  LaunchParams params;
  ProgramHeader header;
  uint64_t heap_bases[MAX_RANKS];
};

constexpr uint32_t MAX_SHARED_BYTES = 232448;  // of a block, compute capability 9.0 and 10.0
constexpr uint32_t STATIC_BYTES = 128;         // of the kernel itself
static_assert(sizeof(Shared) + STATIC_BYTES <= MAX_SHARED_BYTES, "a worker's shared memory does not fit");

extern __shared__ __align__(1024) char shared_memory[];
DISTMK_FN Shared& shared() { return *reinterpret_cast<Shared*>(shared_memory); }

}  // namespace distmk
