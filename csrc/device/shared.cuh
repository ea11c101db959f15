// A worker CTA's shared memory.
#pragma once
#include "device/ring.cuh"
#include "runtime/worker.h"

namespace distmk {

constexpr uint32_t NUM_WARPS = NUM_CONSUMERS / 32;
constexpr uint32_t ROUND_GROUPS = 3;          // row groups whose sums are kept in registers at once
constexpr uint32_t MAX_TILES = MAX_ROWS / 4;  // a token row takes two columns of an 8-column product: high and low half
constexpr uint32_t SCRATCH_BYTES = NUM_WARPS * ROUND_GROUPS * TILE_ROWS * MAX_ROWS * sizeof(float);
constexpr uint32_t VECTOR_BYTES = 72 * 1024;  // activations of a task, where they fit

struct Shared {
  char slots[NUM_STAGES * STAGE_BYTES];  // first: stages must be aligned
  char vector[VECTOR_BYTES];
  char scratch[SCRATCH_BYTES];
  float inverse_rms[MAX_ROWS];
  float warp_sums[NUM_WARPS];
  Ring ring;
  uint32_t next_stage;  // of the launch, for the next task that drains the ring
  Action action;        // what the leader decided
};

extern __shared__ __align__(1024) char shared_memory[];
DISTMK_FN Shared& shared() { return *reinterpret_cast<Shared*>(shared_memory); }

// Sum over the consumers of one value each; every thread gets it. Ends in step.
DISTMK_FN float team_sum(const Team& team, float value) {
  for (uint32_t step = 16; step; step >>= 1) value += __shfl_xor_sync(~0u, value, step);
  if (threadIdx.x % 32 == 0) shared().warp_sums[threadIdx.x / 32] = value;
  team.sync();
  float sum = 0;
  for (uint32_t warp = 0; warp < NUM_WARPS; ++warp) sum += shared().warp_sums[warp];
  team.sync();
  return sum;
}

}  // namespace distmk
