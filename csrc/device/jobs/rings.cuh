// Shared memory of a GEMM in jobs (linear_jobs.cuh). A job program streams no weights through the pipeline
// (core/pipeline.cuh), so the pipeline's stages hold two rings that the loader fills and the consumers empty.
//   A  M tiles of K_TILE columns of weights, in groups. A group is all M tiles of a job in one K tile.
//   B  slots of activations: the tokens of an N tile by ACTIVATION_BLOCK_COLS columns. They lie behind the A ring.
// The mbarriers, set up anew for every task, and the tables of the output are in scratch memory.
#pragma once
#include "device/core/shared.cuh"
#include "device/jobs/job_grid.cuh"

namespace distmk {
namespace jobs {

constexpr uint32_t A_TILE_BYTES = Weights::bytes(M_TILE * K_TILE), MAX_A_TILES = 16, MAX_B_SLOTS = 8;
constexpr uint32_t RING_BYTES = 196608;                                   // both rings together
constexpr uint32_t NUM_GROUPS = 2, GROUP_WARPS = NUM_WARPS / NUM_GROUPS;  // warpgroups
constexpr uint32_t BLOCKS_PER_TILE = K_TILE / ACTIVATION_BLOCK_COLS;
DISTMK_FN uint32_t num_k_tiles(uint32_t num_blocks) { return (num_blocks + BLOCKS_PER_TILE - 1) / BLOCKS_PER_TILE; }
static_assert(!BULK_COPIES || RING_BYTES <= overlay_bytes(Overlay::PRODUCT_RINGS), "");
static_assert(2 * JOB_TILES <= MAX_A_TILES, "the next K tile lands while one is multiplied");

DISTMK_FN constexpr uint32_t b_slot_bytes(uint32_t tile_tokens) {
  return tile_tokens * ACTIVATION_BLOCK_COLS * static_cast<uint32_t>(sizeof(__nv_bfloat16));
}

// How the two rings share their memory. With many tokens, the A ring has no more than two groups. The number of slots
// is a multiple of NUM_GROUPS, so that each slot stays with one warpgroup when the warpgroups take alternate blocks. A
// warpgroup that came back to a slot after two rounds, rather than one, could not tell the two by their parity.
struct RingSizes {
  uint32_t num_tiles, num_slots;

  DISTMK_FN RingSizes(uint32_t tile_tokens, uint32_t job_tiles)
      : num_tiles(splits_evenly(tile_tokens) ? 2 * job_tiles : MAX_A_TILES),
        num_slots(min((RING_BYTES - a_bytes()) / b_slot_bytes(tile_tokens), MAX_B_SLOTS) / NUM_GROUPS * NUM_GROUPS) {}
  DISTMK_FN uint32_t a_bytes() const { return num_tiles * A_TILE_BYTES; }
};

// A job's output, float32 [tokens][OUTPUT_ROWS], lies at the end of the rings' memory, so that the next job's weights
// land while it is stored. With MAX_TOKENS it lies at the beginning, over the A ring, and the next job's activations
// land.
constexpr uint32_t OUTPUT_ROWS = JOB_TILES * M_TILE;
DISTMK_FN constexpr uint32_t output_bytes(uint32_t tile_tokens) {
  return tile_tokens * OUTPUT_ROWS * static_cast<uint32_t>(sizeof(float));
}
DISTMK_FN constexpr uint32_t output_begin(uint32_t tile_tokens) {
  return tile_tokens == MAX_TOKENS ? 0 : RING_BYTES - output_bytes(tile_tokens);
}

// An output feature of a job: where its row of the output begins, in floats from the beginning of the stages. A gated
// feature also has the row of its up.
struct Feature {
  uint32_t row, up_row;
  float bias, up_bias;
};
using FeatureTable = Feature[JOB_TILES * M_TILE];

// An M tile of a job: its output features, and where their biases begin in args.bias. A gated tile also has the biases
// of its up rows.
struct alignas(16) JobTile {
  FeatureRange features;
  uint32_t bias, up_bias;
};
// The scales of the rows of each M tile of a job; null: its format has none. Without packed weights there are none.
struct RowScales {
#ifdef DISTMK_PACKED
  const float* of_tile[JOB_TILES];
#endif
};
// Factors of a job's sums, by row of its M tiles: scales of the matrix and of its rows.
struct RowFactors {
#ifdef DISTMK_PACKED
  float of_row[JOB_TILES * M_TILE];
#endif
};
// The loader's plan of a job for the consumers. The loader computes it while they still run earlier tasks.
//   planned  loader -> consumers    The plan may be read.
//   stored   consumers -> loader    The job's output, which may lie over a ring, has been read.
struct JobPlan : RowScales {
  uint64_t planned, stored;
  uint32_t num_tiles;   // M tiles; 0: there are no more jobs
  uint32_t num_blocks;  // blocks of columns
  uint32_t first_token, num_tokens, k_split;
  FeatureRange features;
  JobTile tiles[JOB_TILES];
};

// State of the rings, with these barriers:
//   ready             consumers -> loader    The inputs are there.
//   a_full, b_full    loader -> consumers    An M tile, or a slot, has landed.
//   a_empty, b_empty  consumers -> loader    The M tile, or the slot, has been read.
struct Rings : RowFactors {
  uint64_t a_full[MAX_A_TILES], a_empty[MAX_A_TILES], b_full[MAX_B_SLOTS], b_empty[MAX_B_SLOTS], ready;
  JobPlan jobs[2];           // successive jobs alternate between them
  FeatureTable features[2];  // also alternating, because other warps may still store the previous job
  LinearJobsArgs args;
  uint32_t instance;                       // this worker's first instance of the task
  uint32_t num_tokens;                     // tokens of the whole GEMM
  uint32_t tile_tokens;                    // tokens of an N tile; this and the next line are set once a job is planned
  uint32_t num_tiles, num_slots, b_begin;  // see RingSizes; b_begin: offset of the B ring in the stages

  // Called by all consumers before the loader uses the barriers. An M tile is read by one warp of each warpgroup, or by
  // one warp that arrives for both. A slot is read by all warps, or by one warpgroup that arrives for both.
  DISTMK_FN void init() {
    constexpr uint32_t ALL_WARPS = NUM_WARPS * WARP_ARRIVALS;
    const uint32_t i = barrier_of_thread();
    if (i < MAX_A_TILES) barrier_init(&a_full[i], 1), barrier_init(&a_empty[i], NUM_GROUPS * WARP_ARRIVALS);
    if (i < MAX_B_SLOTS) barrier_init(&b_full[i], 1), barrier_init(&b_empty[i], ALL_WARPS);
    if (i < 2) barrier_init(&jobs[i].planned, WARP_ARRIVALS), barrier_init(&jobs[i].stored, ALL_WARPS);
    if (i == 2) barrier_init(&ready, WARP_ARRIVALS);
    if (i == 3) forget(features);
    barrier_init_done();
  }
  // Ends the barriers' life, so that their memory can hold other data.
  DISTMK_FN void invalidate() {
    const uint32_t i = barrier_of_thread();
    if (i < MAX_A_TILES) barrier_invalidate(&a_full[i]), barrier_invalidate(&a_empty[i]);
    if (i < MAX_B_SLOTS) barrier_invalidate(&b_full[i]), barrier_invalidate(&b_empty[i]);
    if (i < 2) barrier_invalidate(&jobs[i].planned), barrier_invalidate(&jobs[i].stored);
    if (i == 2) barrier_invalidate(&ready);
  }

 private:
  // Spreads the barriers over the warps, because the lanes of one warp would set them up one after another.
  DISTMK_FN static uint32_t barrier_of_thread() { return threadIdx.x % 32 * NUM_WARPS + threadIdx.x / 32; }
};
DISTMK_FN Rings& rings() { return *shared().at<Overlay::RING_STATE, Rings>(); }

// The plan of a worker's job number `round`, and the parity of the plan's barriers. A job is planned only after the
// last job but one is stored.
DISTMK_FN JobPlan& plan_of(uint32_t round) { return rings().jobs[round % 2]; }
DISTMK_FN uint32_t plan_parity(uint32_t round) { return round / 2 % 2; }

// The places in the A ring that one M tile of a job takes in successive K tiles. A job uses only as many whole groups
// as fit in the ring. So within a job, one lane fills an M tile's places, and only that tile's warps read them. If M
// tiles shared places, another tile could be ahead by more than a round, and phases would be ambiguous. `phases`: for
// each place, the parity of its next use.
class WeightPosition {
 public:
  // `tile`: the M tile among `num_tiles`. `ring_tiles`: capacity of the ring.
  DISTMK_FN WeightPosition(uint32_t phases, uint32_t ring_tiles, uint32_t num_tiles, uint32_t tile)
      : place_(tile), phases_(phases), step_(num_tiles), end_(ring_tiles / num_tiles * num_tiles) {}
  DISTMK_FN uint32_t place() const { return place_; }
  DISTMK_FN uint32_t parity() const { return phases_ >> place_ & 1; }
  DISTMK_FN void advance() {
    place_ += step_;
    if (place_ < end_) return;
    place_ -= end_, phases_ = ~phases_;
  }
  // `phases` after a job of `num_k_tiles` K tiles.
  DISTMK_FN static uint32_t phases_after(uint32_t phases, uint32_t ring_tiles, uint32_t num_tiles,
                                         uint32_t num_k_tiles) {
    const uint32_t num_groups = ring_tiles / num_tiles, rounds = num_k_tiles / num_groups;
    if (rounds % 2) phases ^= (1u << num_groups * num_tiles) - 1;
    return phases ^ ((1u << num_k_tiles % num_groups * num_tiles) - 1);
  }

 private:
  uint32_t place_, phases_, step_, end_;
};
static_assert(MAX_A_TILES < 32, "");

// A position in the B ring.
struct SlotPosition {
  uint32_t slot = 0, parity = 0;

  DISTMK_FN void advance(uint32_t num_slots, uint32_t step) {
    slot += step;
    if (slot < num_slots) return;
    slot -= num_slots, parity ^= 1;
  }
  // Moves on by `count` slots.
  DISTMK_FN void skip(uint32_t num_slots, uint32_t count) {
    slot += count;
    parity ^= slot / num_slots % 2;
    slot %= num_slots;
  }
};

}  // namespace jobs
}  // namespace distmk
