// A worker's pipeline through shared memory: a ring of stages, each with a full and an empty mbarrier. The producer is
// the loader warp. It fills stages with weight slabs, and with keys and values of long splits, in program order. It
// runs across task, layer and iteration boundaries, and waits for no event before it copies a weight slab. The
// consumers are the consumer warps, which release stages as they reach the tasks.
//
// From compute capability 9.0 on, one lane of the loader issues bulk copies. Before that, every lane copies 16 bytes at
// a time with cp.async.
//
// A slab is packed in tiles of M_TILE x K_TILE bf16 (smaller at the edges), in the order in which they are multiplied
// (distmk/formats/tiles.py): M blocks of M_TILES_PER_BLOCK tile rows, each cut into K blocks of K_TILES_PER_BLOCK tile
// columns. The 16-byte chunks of a row are XOR-swizzled by the row number, so that ldmatrix has no bank conflicts. A
// stage holds up to K_TILES_PER_STAGE tiles side by side, one per warp. Tiles of packed formats have codes and scales
// (distmk/formats/packed_tiles.py); a stage holds more of them.
#pragma once
#include "abi.h"
#include "platform/device.h"

namespace distmk {

// A copy costs the loader some hundred nanoseconds, whatever its size. Smaller copies would not saturate the memory.
constexpr uint32_t K_TILES_PER_STAGE = 2, STAGE_K = K_TILES_PER_STAGE * K_TILE, K_BLOCK = K_TILES_PER_BLOCK * K_TILE;
using Weights = Bf16Format;  // the format of streamed matrices that are not packed
constexpr uint32_t M_BLOCK = M_TILES_PER_BLOCK * M_TILE;
// On compute capability 8.0 a block has 64 KB less shared memory.
constexpr uint32_t STAGES_BYTES = (BULK_COPIES ? 12 : 7) * Weights::bytes(M_TILE * STAGE_K);
// ARRIVALS_PER_STAGE: arrivals of consumer warps that empty a stage.
#ifdef DISTMK_PACKED
// The kernel of programs with packed weights: a stage also has scales, and up to eight tiles. Behind the stages are
// accumulators (device/formats/packed_mainloop.cuh).
constexpr uint32_t STAGE_BYTES = 18432, ACCUMULATORS_BYTES = 32768, ARRIVALS_PER_STAGE = K_TILES_PER_BLOCK;
#else
constexpr uint32_t STAGE_BYTES = Weights::bytes(M_TILE * STAGE_K), ACCUMULATORS_BYTES = 0,
                   ARRIVALS_PER_STAGE = K_TILES_PER_STAGE;
#endif
constexpr uint32_t NUM_STAGES = (STAGES_BYTES - ACCUMULATORS_BYTES) / STAGE_BYTES;
// Arrivals for a tile of bf16, and for one of keys and values, of which a stage has as many.
constexpr uint32_t ARRIVALS_PER_TILE = ARRIVALS_PER_STAGE / K_TILES_PER_STAGE;
constexpr uint32_t LOADER_ARRIVALS = BULK_COPIES ? 1 : 32;  // per copy
// Limits on copies in flight. More copies do not read faster, but every store and poll of this SM queues behind them.
// MAX_AHEAD, the lower limit, applies to slabs behind the one that is being multiplied, because before those the
// consumers are likely to wait for other workers.
constexpr uint32_t MAX_IN_FLIGHT = 4, MAX_AHEAD = 3;

struct Pipeline {
  uint64_t full[NUM_STAGES], empty[NUM_STAGES];
  Flag leave;        // the worker has left its loop and will consume no further stage
  Flag loader_left;  // the loader will fill no further stage
  // Loader throttle. A nonzero value says that the worker is about to signal, and the fence of a signal waits for every
  // copy in flight. The loader then copies no slab behind number `throttle` (slabs count from 1): the signal is worth
  // more than a pipeline that is full a little sooner. Keys and values are copied all the same, because their consumer
  // waits for them.
  Flag throttle;

  DISTMK_FN void init() {
    for (uint32_t s = 0; s < NUM_STAGES; ++s) {
      barrier_init(&full[s], LOADER_ARRIVALS);
      barrier_init(&empty[s], ARRIVALS_PER_STAGE * WARP_ARRIVALS);
    }
    leave = loader_left = throttle = {0};
    barrier_init_done();
  }
};

// A position in a pipeline: the index of the stage and the phase bit of its barriers. Both are counted, because
// divisions are slow.
template <uint32_t STAGES>
struct PipelineState {
  static constexpr uint32_t MOST_STEPS = 8;
  uint32_t index = 0, phase = 0;

  DISTMK_FN void advance() {
    if (++index < STAGES) return;
    index = 0;
    phase ^= 1;
  }
  DISTMK_FN PipelineState advanced(uint32_t count) const {  // up to MOST_STEPS
    PipelineState found{index + count, phase};
#pragma unroll
    for (uint32_t around = 0; around < MOST_STEPS; around += STAGES)
      if (found.index >= STAGES) found = {found.index - STAGES, found.phase ^ 1};
    return found;
  }
  DISTMK_FN PipelineState rewound(uint32_t count) const {  // up to STAGES
    return index >= count ? PipelineState{index - count, phase} : PipelineState{index + STAGES - count, phase ^ 1};
  }
};

// What is copied of a slab at once: up to `k` columns of up to M_TILE rows. 2^log_unit_k columns take `row_bytes` of
// each row, and `scale_bytes` more of all rows together.
struct StageShape {
  uint32_t k, log_unit_k, row_bytes, scale_bytes;
};
constexpr StageShape BF16_STAGE = {STAGE_K, 0, Weights::bytes(1u), 0};

// A weight matrix of `rows` x `k_pitch` elements, in tiles.
struct WeightSlab {
  const char* begin;
  uint32_t rows, k_pitch;
#ifdef DISTMK_PACKED
  StageShape stage = BF16_STAGE;
#else
  static constexpr StageShape stage = BF16_STAGE;
#endif
};

// The producer side, run by the loader warp. One lane issues all bulk copies, but the warp stays converged: diverged
// lanes would alternate with that lane, and every instruction between two copies delays the next read.
class Loader {
 public:
  // `num_drained`: number of slabs that consumer warp 0 has released. The other warps may be behind.
  DISTMK_FN Loader(Pipeline& pipeline, char* stages, const Flag& num_drained)
      : pipeline_(pipeline),
        full_(opaque(shared_address(pipeline.full))),
        empty_(opaque(shared_address(pipeline.empty))),
        stages_(opaque(shared_address(stages))),
        throttle_(opaque(shared_address(&pipeline.throttle))),
        lanes_{threadIdx.x % 32, 32},
        num_drained_(num_drained) {}

  // Copies one slab. False: the worker has left. The loader checks for that once per M block. Until it does,
  // release_until_loader_left() keeps freeing stages for it.
  DISTMK_FN bool stream(const WeightSlab& weights) {
    ++slab_;
    const char* slab = weights.begin;
    const uint32_t rows = weights.rows;
    const StageShape shape = weights.stage;
    for (uint32_t block = 0; block < rows; block += M_BLOCK) {
      if (!lanes_.all(!pipeline_.leave.get())) return false;
      const uint32_t block_end = min(block + M_BLOCK, rows);
#pragma unroll 1
      for (uint32_t left = weights.k_pitch; left; left -= min(K_BLOCK, left)) {
#pragma unroll 1
        for (uint32_t row = block; row < block_end; row += M_TILE) {
          const uint32_t unit_bytes = min(M_TILE, rows - row) * shape.row_bytes + shape.scale_bytes;
#pragma unroll 1
          for (uint32_t in_block = min(K_BLOCK, left); in_block; in_block -= min(shape.k, in_block)) {
            const uint32_t num_bytes = (min(shape.k, in_block) >> shape.log_unit_k) * unit_bytes;
            copy(slab, num_bytes);
            slab += num_bytes;
          }
        }
      }
    }
    return true;
  }

  // Fills `num_stages` stages with `fill(stage, dst, full)`, which all lanes call. Together the stages count as one
  // slab.
  template <class Fill>
  DISTMK_FN bool stream_stages(uint32_t num_stages, const Fill& fill) {
    ++slab_;
    if (!lanes_.all(!pipeline_.leave.get())) return false;
#pragma unroll 1
    for (uint32_t stage = 0; stage < num_stages; ++stage) {
      producer_acquire();
      fill(stage, stages_ + next_.index * STAGE_BYTES, full_ + next_.index * 8);
      next_.advance();
    }
    return true;
  }

  // Waits until all copies have landed. The CTA may not give up its shared memory before that.
  DISTMK_FN void leave() {
    for (uint32_t i = MAX_IN_FLIGHT; i; --i) wait_landed(next_.rewound(i));
    lanes_.sync();
    if (lanes_.leader()) pipeline_.loader_left.set(1);
  }

 private:
  Pipeline& pipeline_;
  // Shared addresses. They are opaque, because the compiler would otherwise compute them anew for every copy.
  const uint32_t full_, empty_, stages_, throttle_;
  const Team lanes_;
  PipelineState<NUM_STAGES> next_;
  const Flag& num_drained_;
  uint32_t slab_ = 0;  // number of the slab that is being copied; slabs count from 1

  // A stage that has never been filled counts as landed.
  DISTMK_FN void wait_landed(const PipelineState<NUM_STAGES>& stage) {
    barrier_wait(full_ + stage.index * 8, stage.phase);
  }

  // Waits until stage `next_` is empty and few enough copies are in flight.
  DISTMK_FN void producer_acquire() {
    wait_landed(next_.rewound(MAX_IN_FLIGHT));
    if (num_drained_.get() + 1 < slab_) wait_landed(next_.rewound(MAX_AHEAD));
    barrier_wait(empty_ + next_.index * 8, next_.phase ^ 1);
    lanes_.sync();
  }

  DISTMK_FN void copy(const char* src, uint32_t num_bytes) {
    const uint32_t full = full_ + next_.index * 8, dst = stages_ + next_.index * STAGE_BYTES;
    producer_acquire();
    wait_while_throttled(throttle_, slab_);
    if constexpr (!BULK_COPIES)
      copy_by_lanes(dst, src, num_bytes, full, lanes_.index, lanes_.size);
    else if (lanes_.leader())
      copy_bulk(dst, src, num_bytes, full);
    next_.advance();
  }
};

// The consumer side of a worker that has left its loop. One thread releases every stage from `next` on until the loader
// has left too.
DISTMK_FN void release_until_loader_left(Pipeline& pipeline, PipelineState<NUM_STAGES> next) {
  pipeline.leave.set(1);
  for (;; next.advance()) {
    while (!barrier_try_wait(&pipeline.full[next.index], next.phase))
      if (pipeline.loader_left.get()) return;
    barrier_arrive(&pipeline.empty[next.index], ARRIVALS_PER_STAGE * WARP_ARRIVALS);
  }
}

}  // namespace distmk
