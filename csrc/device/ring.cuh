// A worker's weight stream: a loader copies slabs into a ring of shared memory in program order, across task, layer and
// iteration boundaries, and never waits for an event; the consumer warps drain it as their tasks come up. From compute
// capability 9.0 on the loader is one lane that issues bulk copies; before, a warp that copies 16 bytes a lane.
//
// A slab is packed in tiles of TILE_ROWS x TILE_K bf16 (fewer at the edges), a tile a stage, 16-byte chunks of a row
// exchanged by the row number so that ldmatrix meets no bank twice.
#pragma once
#include "abi.h"
#include "device/platform.h"

namespace distmk {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool BULK_COPIES = false;
constexpr uint32_t NUM_STAGES = 8;  // a block has 64 KB less of shared memory there
#else
constexpr bool BULK_COPIES = true;
constexpr uint32_t NUM_STAGES = 16;
#endif
constexpr uint32_t LOADER_LANES = BULK_COPIES ? 1 : 32;
constexpr uint32_t STAGE_BYTES = 8192;
constexpr uint32_t TILE_ROWS = 16;
constexpr uint32_t TILE_K = 256;
// A slab lies group of rows by group of rows, a group tile by tile. It is streamed in rounds of a few groups, a round
// in blocks of columns: as many activations as fit into shared memory at any number of token rows.
constexpr uint32_t ROUND_GROUPS = 3;  // row groups whose sums are kept in registers at once
constexpr uint32_t ROUND_ROWS = ROUND_GROUPS * TILE_ROWS;
constexpr uint32_t BLOCK_K = 4 * TILE_K;
// More copies in flight do not read faster, but stand in front of every store and poll of this SM.
constexpr uint32_t MAX_IN_FLIGHT = 6;
static_assert(NUM_STAGES % (NUM_CONSUMERS / 32) == 0, "a warp always drains the same slots");

DISTMK_FN uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

DISTMK_FN void barrier_init(uint64_t* barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count));
}
// Looks once; from compute capability 9.0 on it may rest a while before it says no.
DISTMK_FN bool barrier_try_wait(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  if constexpr (BULK_COPIES)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
  else
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
  return done;
}
DISTMK_FN void barrier_wait(uint64_t* barrier, uint32_t parity) {
  while (!barrier_try_wait(barrier, parity)) {
  }
}
DISTMK_FN void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

struct Ring {
  uint64_t full[NUM_STAGES], empty[NUM_STAGES];
  volatile uint32_t leave;  // the worker has left its loop: nothing more will be drained

  DISTMK_FN void init() {
    for (uint32_t s = 0; s < NUM_STAGES; ++s) {
      barrier_init(&full[s], LOADER_LANES);
      barrier_init(&empty[s], 1);
    }
    leave = 0;
    if constexpr (BULK_COPIES) asm volatile("fence.mbarrier_init.release.cluster;");
  }
};

// Stage number `j` of the launch lies in slot j % NUM_STAGES; the parity of its use tells it from the one before.
DISTMK_FN uint32_t slot_of(uint32_t stage) { return stage % NUM_STAGES; }
DISTMK_FN uint32_t parity_of(uint32_t stage) { return stage / NUM_STAGES % 2; }

DISTMK_FN uint32_t slab_rows(const LinearArgs& args) {
  return args.epilogue == static_cast<uint32_t>(Epilogue::SWIGLU) ? 2 * args.n : args.n;
}
DISTMK_FN uint32_t num_chunks(const LinearArgs& args) { return (args.k_pitch + TILE_K - 1) / TILE_K; }
DISTMK_FN uint32_t num_groups(const LinearArgs& args) { return (slab_rows(args) + TILE_ROWS - 1) / TILE_ROWS; }

DISTMK_FN bool streams_weights(const TaskDesc& task) { return task.type == static_cast<uint16_t>(TaskType::LINEAR); }

// Run by LOADER_LANES lanes of a warp together.
class Loader {
 public:
  DISTMK_FN Loader(Ring& ring, char* slots) : ring_(ring), slots_(slots), lanes_{threadIdx.x % 32, LOADER_LANES} {}

  // One slab. False: the worker has left.
  DISTMK_FN bool stream(const LinearArgs& args, const char* slab) {
    const uint32_t rows = slab_rows(args), row_bytes = args.k_pitch * sizeof(__nv_bfloat16);
    for (uint32_t round = 0; round < rows; round += ROUND_ROWS) {
      for (uint32_t block = 0; block < args.k_pitch; block += BLOCK_K) {
        for (uint32_t row = round; row < min(round + ROUND_ROWS, rows); row += TILE_ROWS) {
          const uint32_t tile_rows = min(TILE_ROWS, rows - row);
          for (uint32_t k = block; k < min(block + BLOCK_K, args.k_pitch); k += TILE_K) {
            if (!claim_slot()) return false;
            copy(slab + uint64_t{row} * row_bytes + tile_rows * k * sizeof(__nv_bfloat16),
                 tile_rows * min(TILE_K, args.k_pitch - k) * sizeof(__nv_bfloat16));
          }
        }
      }
    }
    return true;
  }

  // Copies must have landed before their shared memory is given back.
  DISTMK_FN void drain() const {
    for (uint32_t stage = issued_ > NUM_STAGES ? issued_ - NUM_STAGES : 0; stage < issued_; ++stage)
      barrier_wait(&ring_.full[slot_of(stage)], parity_of(stage));
  }

 private:
  Ring& ring_;
  char* slots_;
  const Team lanes_;
  uint32_t issued_ = 0;

  // Waits until the next stage's slot has been drained. False: the worker has left.
  DISTMK_FN bool claim_slot() const {
    if (issued_ >= MAX_IN_FLIGHT) {
      const uint32_t oldest = issued_ - MAX_IN_FLIGHT;
      barrier_wait(&ring_.full[slot_of(oldest)], parity_of(oldest));
    }
    while (!lanes_.all(barrier_try_wait(&ring_.empty[slot_of(issued_)], parity_of(issued_) ^ 1)))
      if (!lanes_.all(!ring_.leave)) return false;
    return true;
  }

  DISTMK_FN void copy(const char* src, uint32_t num_bytes) {
    const uint32_t slot = slot_of(issued_++), full = shared_address(&ring_.full[slot]);
    const uint32_t dst = shared_address(slots_ + slot * STAGE_BYTES);
    if constexpr (BULK_COPIES) {
      asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(full), "r"(num_bytes));
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
                   "l"(src), "r"(num_bytes), "r"(full)
                   : "memory");
    } else {
      for (uint32_t at = lanes_.index * 16; at < num_bytes; at += LOADER_LANES * 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst + at), "l"(src + at) : "memory");
      // Every lane arrives once its own copies have landed.
      asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(full) : "memory");
    }
  }
};

}  // namespace distmk
