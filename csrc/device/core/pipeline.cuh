// A worker's weight stream: a loader copies slabs into a ring of shared memory in program order, across task, layer and
// iteration boundaries, and never waits for an event; the consumer warps drain it as their tasks come up. The loader is
// a warp. From compute capability 9.0 on one of its lanes issues bulk copies; before, each lane copies 16 bytes at a
// time.
//
// A slab is packed in tiles of M_TILE x K_TILE bf16 (fewer at the edges), in rounds of a few groups of rows and
// blocks of a few columns of tiles, as they are multiplied (distmk/weights/packing.py); 16-byte chunks of a row are
// exchanged by the row number so that ldmatrix meets no bank twice. A stage holds up to K_TILES_PER_STAGE tiles side by
// side, for a warp each.
#pragma once
#include "abi.h"
#include "platform/device.h"

namespace distmk {

// A copy costs the loader some hundred nanoseconds whatever its size: small ones would fall behind the memory.
constexpr uint32_t K_TILES_PER_STAGE = 2, STAGE_K = K_TILES_PER_STAGE * K_TILE, K_BLOCK = K_TILES_PER_BLOCK * K_TILE;
constexpr uint32_t STAGE_BYTES = M_TILE * STAGE_K * sizeof(__nv_bfloat16);
constexpr uint32_t M_BLOCK = M_TILES_PER_BLOCK * M_TILE;
// A block of capability 8.0 has 64 KB less of shared memory.
constexpr uint32_t NUM_STAGES = BULK_COPIES ? 12 : 7;
constexpr uint32_t LOADER_ARRIVALS = BULK_COPIES ? 1 : 32;  // for a copy
// More copies in flight do not read faster, but stand in front of every store and poll of this SM: there are fewest
// while the consumers wait for others, so of slabs behind the one that they are at.
constexpr uint32_t MAX_IN_FLIGHT = 4, MAX_AHEAD = 3;

struct Ring {
  uint64_t full[NUM_STAGES], empty[NUM_STAGES];
  Flag leave;        // the worker has left its loop: nothing more will be multiplied
  Flag loader_left;  // nothing more will be copied
  // Not 0: the worker is about to signal, which takes until every copy in flight has landed, so nothing new is copied
  // of the slabs behind this one (slabs count from 1). What waits for the signal is worth more than the ring's being
  // full a little sooner. Keys and values are copied all the same: who takes them waits for them at once.
  Flag throttle;

  DISTMK_FN void init() {
    for (uint32_t s = 0; s < NUM_STAGES; ++s) {
      barrier_init(&full[s], LOADER_ARRIVALS);
      barrier_init(&empty[s], K_TILES_PER_STAGE * WARP_ARRIVALS);
    }
    leave = loader_left = throttle = {0};
    barrier_init_done();
  }
};

// A place in a ring, counted because divisions are slow: the slot, and the parity of its use, which tells it from the
// one before.
template <uint32_t NUM_SLOTS>
struct PipelineState {
  static constexpr uint32_t MOST_STEPS = 8;
  uint32_t index = 0, phase = 0;

  DISTMK_FN void advance() {
    if (++index < NUM_SLOTS) return;
    index = 0;
    phase ^= 1;
  }
  DISTMK_FN PipelineState advanced(uint32_t count) const {  // up to MOST_STEPS
    PipelineState found{index + count, phase};
#pragma unroll
    for (uint32_t around = 0; around < MOST_STEPS; around += NUM_SLOTS)
      if (found.index >= NUM_SLOTS) found = {found.index - NUM_SLOTS, found.phase ^ 1};
    return found;
  }
  DISTMK_FN PipelineState rewound(uint32_t count) const {  // up to NUM_SLOTS
    return index >= count ? PipelineState{index - count, phase} : PipelineState{index + NUM_SLOTS - count, phase ^ 1};
  }
};

// One thread of a worker that has left, from stage `next` on: makes room until the loader has noticed.
DISTMK_FN void release(Ring& ring, PipelineState<NUM_STAGES> next) {
  ring.leave.set(1);
  for (;; next.advance()) {
    while (!barrier_try_wait(&ring.full[next.index], next.phase))
      if (ring.loader_left.get()) return;
    barrier_arrive(&ring.empty[next.index], K_TILES_PER_STAGE * WARP_ARRIVALS);
  }
}

}  // namespace distmk
