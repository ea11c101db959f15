// How the consumers' warps share out what comes through the ring, and multiply it: each takes tiles of its own.
#pragma once
#include "device/linear_output.cuh"
#include "device/tensor_core.cuh"

namespace distmk {
namespace linear {

// Of the stages of a slab a warp takes every so many-th, and in it always the same tile.
constexpr uint32_t STAGE_TEAMS = NUM_WARPS / STAGE_TILES;

DISTMK_FN uint32_t tile_in_stage() { return threadIdx.x / 32 % STAGE_TILES; }
DISTMK_FN uint32_t first_turn() { return STAGE_TEAMS - 1 - threadIdx.x / 32 / STAGE_TILES; }  // stages before its first

// Where a warp finds its tile of a stage.
DISTMK_FN const char* tile_of(const RingPlace<NUM_STAGES>& stage, uint32_t group_rows) {
  return shared().slots + stage.slot * STAGE_BYTES + tile_in_stage() * TILE_K * group_rows * sizeof(__nv_bfloat16);
}

// The warp with a stage's last tile gives back what tiles are missing in it.
DISTMK_FN void give_back(const RingPlace<NUM_STAGES>& stage, bool last) {
  warp_arrive(&shared().ring.empty[stage.slot], last ? STAGE_TILES - tile_in_stage() : 1);
}

template <uint32_t TILES>
DISTMK_FN void add_tile(const float (&tile)[TILES][4], uint32_t group, typename Round<TILES>::Sums& sums) {
#pragma unroll
  for (uint32_t g = 0; g < ROUND_GROUPS; ++g)
#pragma unroll
    for (uint32_t t = 0; t < TILES; ++t)
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) sums[g][t][i] += g == group ? tile[t][i] : 0.0f;
}

static_assert(ROUND_GROUPS * BLOCK_K / STAGE_K <= RingPlace<NUM_STAGES>::MOST_STEPS, "stages of a block");

// A warp's part of a block of K whose activations lie at `place`. `turn` counts the stages before its next.
template <uint32_t TILES>
DISTMK_FN void multiply_block(uint32_t place, const Lane<TILES>& lane, const Round<TILES>& round, uint32_t block,
                              uint32_t block_end, RingPlace<NUM_STAGES>& stage, uint32_t& turn,
                              typename Round<TILES>::Sums& sums) {
  static_assert(BLOCK_K == 2 * STAGE_K, "one or two stages a group");
  const uint32_t halved = block_end - block > STAGE_K;
  const uint32_t num_stages = (round.end_row - round.first_row + TILE_ROWS - 1) / TILE_ROWS << halved;
#pragma unroll 1
  for (; turn < num_stages; turn += STAGE_TEAMS) {
    const uint32_t group = turn >> halved, k = block + (turn & halved) * STAGE_K + tile_in_stage() * TILE_K;
    if (k >= block_end) continue;
    const RingPlace<NUM_STAGES> at = stage.after(turn);
    float tile_sums[TILES][4] = {};
    barrier_wait(&shared().ring.full[at.slot], at.parity);
    multiply_tile<TILES>(tile_of(at, min(TILE_ROWS, round.end_row - round.first_row - group * TILE_ROWS)),
                         min(TILE_K, block_end - k), place + k - block, lane, tile_sums);
    give_back(at, k + TILE_K >= block_end);
    add_tile<TILES>(tile_sums, group, sums);
  }
  turn -= num_stages;
  stage = stage.after(num_stages);
}

// A warp's first tile of a slab, taken into registers before there are activations to multiply it with: the loader has
// that much more room while everybody waits. Of slabs whose first block is a whole one.
struct EarlyTile {
  HeldTile<1> tile;
  uint32_t num_stages = 0;  // that are taken by all warps together
  uint32_t mine = first_turn();

  DISTMK_FN void take(const LinearArgs& args, uint32_t rows, RingPlace<NUM_STAGES> stage, const Lane<1>& lane) {
    static_assert(STAGE_TEAMS == 2 * STAGES_A_ROW, "");
    num_stages = args.k_pitch < BLOCK_K ? 0 : rows > TILE_ROWS ? STAGE_TEAMS : STAGES_A_ROW;
    if (!has_tile()) {
      tile = {};  // or the compiler would keep its registers for whatever they hold, in all other tasks too
      return;
    }
    stage = stage.after(mine);
    barrier_wait(&shared().ring.full[stage.slot], stage.parity);
    tile.load(tile_of(stage, min(TILE_ROWS, rows - group() * TILE_ROWS)), lane);
    give_back(stage, false);
  }
  DISTMK_FN bool has_tile() const { return mine < num_stages; }
  DISTMK_FN void multiply(const Lane<1>& lane, Round<1>::Sums& sums) const {
    if (!has_tile()) return;
    float tile_sums[1][4] = {};
    tile.multiply(mine % STAGES_A_ROW * STAGE_K + tile_in_stage() * TILE_K, lane, tile_sums);
    add_tile<1>(tile_sums, group(), sums);
  }

 private:
  static constexpr uint32_t STAGES_A_ROW = BLOCK_K / STAGE_K;
  DISTMK_FN uint32_t group() const { return mine / STAGES_A_ROW; }
};

}  // namespace linear
}  // namespace distmk
