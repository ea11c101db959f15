// A worker's weight stream: a loader copies slabs into a ring of shared memory in program order, across task, layer and
// iteration boundaries, and never waits for an event; the consumer warps drain it as their tasks come up. The loader is
// a warp. From compute capability 9.0 on one of its lanes issues bulk copies; before, each lane copies 16 bytes at a
// time.
//
// A slab is packed in tiles of TILE_ROWS x TILE_K bf16 (fewer at the edges), in rounds of a few groups of rows and
// blocks of a few columns of tiles, as they are multiplied (distmk/tiles.py); 16-byte chunks of a row are exchanged by
// the row number so that ldmatrix meets no bank twice. A stage holds up to STAGE_TILES tiles side by side, for a warp
// each.
#pragma once
#include "abi.h"
#include "device/platform.h"

namespace distmk {

// A copy costs the loader some hundred nanoseconds whatever its size: small ones would fall behind the memory.
constexpr uint32_t STAGE_TILES = 2, STAGE_K = STAGE_TILES * TILE_K, BLOCK_K = BLOCK_TILES * TILE_K;
constexpr uint32_t STAGE_BYTES = TILE_ROWS * STAGE_K * sizeof(__nv_bfloat16);
constexpr uint32_t ROUND_ROWS = ROUND_GROUPS * TILE_ROWS;
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
  Flag hold;

  DISTMK_FN void init() {
    for (uint32_t s = 0; s < NUM_STAGES; ++s) {
      barrier_init(&full[s], LOADER_ARRIVALS);
      barrier_init(&empty[s], STAGE_TILES * WARP_ARRIVALS);
    }
    leave = loader_left = hold = {0};
    barrier_init_done();
  }
};

// A place in a ring, counted because divisions are slow: the slot, and the parity of its use, which tells it from the
// one before.
template <uint32_t NUM_SLOTS>
struct RingPlace {
  static constexpr uint32_t MOST_STEPS = 8;
  uint32_t slot = 0, parity = 0;

  DISTMK_FN void step() {
    if (++slot < NUM_SLOTS) return;
    slot = 0;
    parity ^= 1;
  }
  DISTMK_FN RingPlace after(uint32_t count) const {  // up to MOST_STEPS
    RingPlace found{slot + count, parity};
#pragma unroll
    for (uint32_t around = 0; around < MOST_STEPS; around += NUM_SLOTS)
      if (found.slot >= NUM_SLOTS) found = {found.slot - NUM_SLOTS, found.parity ^ 1};
    return found;
  }
  DISTMK_FN RingPlace before(uint32_t count) const {  // up to NUM_SLOTS
    return slot >= count ? RingPlace{slot - count, parity} : RingPlace{slot + NUM_SLOTS - count, parity ^ 1};
  }
};

DISTMK_FN uint32_t slab_rows(const LinearArgs& args) {
  return args.epilogue == static_cast<uint32_t>(Epilogue::SWIGLU) ? 2 * args.n : args.n;
}

DISTMK_FN bool streams_weights(const TaskDesc& task) { return task.type == static_cast<uint16_t>(TaskType::LINEAR); }

// Run by a warp together, where one lane issues bulk copies: lanes that went another way would take turns with it. What
// it does between two copies keeps the memory waiting.
class Loader {
 public:
  // `num_drained`: slabs that the consumers are done with.
  DISTMK_FN Loader(Ring& ring, char* slots, const Flag& num_drained)
      : ring_(ring),
        full_(opaque(shared_address(ring.full))),
        empty_(opaque(shared_address(ring.empty))),
        slots_(opaque(shared_address(slots))),
        hold_(opaque(shared_address(&ring.hold))),
        lanes_{threadIdx.x % 32, 32},
        num_drained_(num_drained) {}

  // One slab. False: the worker has left, which is looked for once a round: until then release() makes room.
  DISTMK_FN bool stream(const LinearArgs& args, const char* slab) {
    ++slab_;
    const uint32_t rows = slab_rows(args);
    for (uint32_t round = 0; round < rows; round += ROUND_ROWS) {
      if (!lanes_.all(!ring_.leave.get())) return false;
      const uint32_t round_end = min(round + ROUND_ROWS, rows);
#pragma unroll 1
      for (uint32_t left = args.k_pitch; left; left -= min(BLOCK_K, left)) {
#pragma unroll 1
        for (uint32_t row = round; row < round_end; row += TILE_ROWS) {
          const uint32_t column_bytes = min(TILE_ROWS, rows - row) * sizeof(__nv_bfloat16);
#pragma unroll 1
          for (uint32_t in_block = min(BLOCK_K, left); in_block; in_block -= min(STAGE_K, in_block)) {
            const uint32_t num_bytes = min(STAGE_K, in_block) * column_bytes;
            copy(slab, num_bytes);
            slab += num_bytes;
          }
        }
      }
    }
    return true;
  }

  // `num_stages` stages of something else than a slab, which counts as one: `fill(stage, dst, full)` by all lanes.
  template <class Fill>
  DISTMK_FN bool stream_stages(uint32_t num_stages, const Fill& fill) {
    ++slab_;
    if (!lanes_.all(!ring_.leave.get())) return false;
#pragma unroll 1
    for (uint32_t stage = 0; stage < num_stages; ++stage) {
      await_room();
      fill(stage, slots_ + next_.slot * STAGE_BYTES, full_ + next_.slot * 8);
      next_.step();
    }
    return true;
  }

  // Copies must have landed before their shared memory is given back.
  DISTMK_FN void leave() {
    for (uint32_t i = MAX_IN_FLIGHT; i; --i) await_landing(next_.before(i));
    lanes_.sync();
    if (lanes_.leader()) ring_.loader_left.set(1);
  }

 private:
  Ring& ring_;
  const uint32_t full_, empty_, slots_, hold_;  // opaque: the compiler would work an address out anew for every copy
  const Team lanes_;
  RingPlace<NUM_STAGES> next_;
  const Flag& num_drained_;
  uint32_t slab_ = 0;  // that is copied; slabs count from 1

  // Of a copy that was never issued, as there are in the beginning, the barrier says so at once.
  DISTMK_FN void await_landing(const RingPlace<NUM_STAGES>& place) {
    barrier_wait(full_ + place.slot * 8, place.parity);
  }

  DISTMK_FN void await_room() {
    await_landing(next_.before(MAX_IN_FLIGHT));
    if (num_drained_.get() + 1 < slab_) await_landing(next_.before(MAX_AHEAD));
    barrier_wait(empty_ + next_.slot * 8, next_.parity ^ 1);
    lanes_.sync();
  }

  DISTMK_FN void copy(const char* src, uint32_t num_bytes) {
    const uint32_t full = full_ + next_.slot * 8, dst = slots_ + next_.slot * STAGE_BYTES;
    await_room();
    wait_while_held(hold_, slab_);
    if constexpr (!BULK_COPIES)
      copy_by_lanes(dst, src, num_bytes, full, lanes_.index, lanes_.size);
    else if (lanes_.leader())
      copy_bulk(dst, src, num_bytes, full);
    next_.step();
  }
};

// One thread of a worker that has left, from stage `next` on: makes room until the loader has noticed.
DISTMK_FN void release(Ring& ring, RingPlace<NUM_STAGES> next) {
  ring.leave.set(1);
  for (;; next.step()) {
    while (!barrier_try_wait(&ring.full[next.slot], next.parity))
      if (ring.loader_left.get()) return;
    barrier_arrive(&ring.empty[next.slot], STAGE_TILES * WARP_ARRIVALS);
  }
}

}  // namespace distmk
