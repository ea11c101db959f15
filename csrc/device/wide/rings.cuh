// Shared memory of a wide product. A wide program streams no weights through the pipeline (core/pipeline.cuh), so its
// stages hold two rings that the loader fills and the consumers empty:
//   A  two slots of weights, the M tiles of a job by K_TILE columns; behind the mainloop also the job's output
//   B  slots of activations, the tokens of an N tile by WIDE_COLS columns
// Their mbarriers, set up anew for every task, and the tables of the output are in the scratch memory.
#pragma once
#include "device/core/shared.cuh"
#include "device/wide/division.cuh"

namespace distmk {
namespace wide {

constexpr uint32_t A_TILE_BYTES = M_TILE * K_TILE * sizeof(__nv_bfloat16), A_SLOT_BYTES = JOB_TILES * A_TILE_BYTES;
constexpr uint32_t A_SLOTS = 2, A_BYTES = A_SLOTS * A_SLOT_BYTES;
constexpr uint32_t B_BYTES = 65536, MAX_B_SLOTS = 8;
constexpr uint32_t BLOCKS_PER_TILE = K_TILE / WIDE_COLS;
static_assert(!BULK_COPIES || A_BYTES + B_BYTES <= sizeof(Shared::stages), "");

DISTMK_FN constexpr uint32_t b_slot_bytes(uint32_t tile_tokens) {
  return tile_tokens * WIDE_COLS * static_cast<uint32_t>(sizeof(__nv_bfloat16));
}
DISTMK_FN constexpr uint32_t num_b_slots(uint32_t tile_tokens) {
  return B_BYTES / b_slot_bytes(tile_tokens) < MAX_B_SLOTS ? B_BYTES / b_slot_bytes(tile_tokens) : MAX_B_SLOTS;
}

// An output feature of a job: its row in the job's M tiles; of gate and up, that of up as well.
struct Feature {
  uint32_t row, up_row;
  float bias, up_bias;
};
using FeatureTable = Feature[JOB_TILES * M_TILE];

//   a_full, b_full    loader -> consumers    a slot has landed
//   a_empty, b_empty  consumers -> loader    a slot has been read
//   stored            consumers -> loader    a job's output, which lies over the A ring, has been read
//   left              loader -> consumers    it has learned of the task, filled its rings and left them
struct Rings {
  uint64_t a_full[A_SLOTS], a_empty[A_SLOTS], b_full[MAX_B_SLOTS], b_empty[MAX_B_SLOTS], stored, left;
  uint32_t instance;                     // of the task: the number of its first one here
  alignas(16) FeatureTable features[2];  // of a job and of the one before, which other warps may still store

  // By all consumers, `thread` of them: none but these uses the barriers. Each lane of the loader that copies an M tile
  // arrives at `a_full`.
  DISTMK_FN void init(uint32_t thread) {
    constexpr uint32_t ALL_WARPS = NUM_WARPS * WARP_ARRIVALS;
    if (thread < A_SLOTS) barrier_init(&a_full[thread], JOB_TILES), barrier_init(&a_empty[thread], ALL_WARPS);
    if (thread < MAX_B_SLOTS) barrier_init(&b_full[thread], 1), barrier_init(&b_empty[thread], ALL_WARPS);
    if (thread == 0) barrier_init(&stored, ALL_WARPS), barrier_init(&left, WARP_ARRIVALS);
    barrier_init_done();
  }
  // The memory may then be used for something else.
  DISTMK_FN void invalidate(uint32_t thread) {
    if (thread < A_SLOTS) barrier_invalidate(&a_full[thread]), barrier_invalidate(&a_empty[thread]);
    if (thread < MAX_B_SLOTS) barrier_invalidate(&b_full[thread]), barrier_invalidate(&b_empty[thread]);
    if (thread == 0) barrier_invalidate(&stored), barrier_invalidate(&left);
  }
};
static_assert(sizeof(Rings) <= SCRATCH_BYTES, "");

DISTMK_FN Rings& rings() { return *reinterpret_cast<Rings*>(shared().scratch); }

// A position in a ring, counted from the beginning of the task.
template <uint32_t SLOTS>
struct RingPosition {
  uint32_t count;

  DISTMK_FN uint32_t slot() const { return count % SLOTS; }
  DISTMK_FN uint32_t parity() const { return count / SLOTS % 2; }
};

}  // namespace wide
}  // namespace distmk
