// The loader warp: streams weight slabs, and keys and values of long splits, through the pipeline in program order.
#pragma once
#include "abi.h"
#include "device/core/pipeline.cuh"

namespace distmk {

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
        throttle_(opaque(shared_address(&ring.throttle))),
        lanes_{threadIdx.x % 32, 32},
        num_drained_(num_drained) {}

  // One slab. False: the worker has left, which is looked for once a round: until then release() makes room.
  DISTMK_FN bool stream(const LinearArgs& args, const char* slab) {
    ++slab_;
    const uint32_t rows = slab_rows(args);
    for (uint32_t round = 0; round < rows; round += M_BLOCK) {
      if (!lanes_.all(!ring_.leave.get())) return false;
      const uint32_t round_end = min(round + M_BLOCK, rows);
#pragma unroll 1
      for (uint32_t left = args.k_pitch; left; left -= min(K_BLOCK, left)) {
#pragma unroll 1
        for (uint32_t row = round; row < round_end; row += M_TILE) {
          const uint32_t column_bytes = min(M_TILE, rows - row) * sizeof(__nv_bfloat16);
#pragma unroll 1
          for (uint32_t in_block = min(K_BLOCK, left); in_block; in_block -= min(STAGE_K, in_block)) {
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
      producer_acquire();
      fill(stage, slots_ + next_.index * STAGE_BYTES, full_ + next_.index * 8);
      next_.advance();
    }
    return true;
  }

  // Copies must have landed before their shared memory is given back.
  DISTMK_FN void leave() {
    for (uint32_t i = MAX_IN_FLIGHT; i; --i) wait_landed(next_.rewound(i));
    lanes_.sync();
    if (lanes_.leader()) ring_.loader_left.set(1);
  }

 private:
  Ring& ring_;
  const uint32_t full_, empty_, slots_,
      throttle_;  // opaque: the compiler would work an address out anew for every copy
  const Team lanes_;
  PipelineState<NUM_STAGES> next_;
  const Flag& num_drained_;
  uint32_t slab_ = 0;  // that is copied; slabs count from 1

  // Of a copy that was never issued, as there are in the beginning, the barrier says so at once.
  DISTMK_FN void wait_landed(const PipelineState<NUM_STAGES>& place) {
    barrier_wait(full_ + place.index * 8, place.phase);
  }

  DISTMK_FN void producer_acquire() {
    wait_landed(next_.rewound(MAX_IN_FLIGHT));
    if (num_drained_.get() + 1 < slab_) wait_landed(next_.rewound(MAX_AHEAD));
    barrier_wait(empty_ + next_.index * 8, next_.phase ^ 1);
    lanes_.sync();
  }

  DISTMK_FN void copy(const char* src, uint32_t num_bytes) {
    const uint32_t full = full_ + next_.index * 8, dst = slots_ + next_.index * STAGE_BYTES;
    producer_acquire();
    wait_while_throttled(throttle_, slab_);
    if constexpr (!BULK_COPIES)
      copy_by_lanes(dst, src, num_bytes, full, lanes_.index, lanes_.size);
    else if (lanes_.leader())
      copy_bulk(dst, src, num_bytes, full);
    next_.advance();
  }
};

}  // namespace distmk
