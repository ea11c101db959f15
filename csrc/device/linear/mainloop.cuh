// How the consumers' warps share out what comes through the ring, and multiply it: of a block each has a column of
// tiles of its own.
#pragma once
#include "device/linear/epilogue.cuh"
#include "device/linear/fragments.cuh"

namespace distmk {
namespace linear {

static_assert(NUM_WARPS == K_TILES_PER_BLOCK, "a column of tiles a warp");

// The stage of a group with this warp's tile, which is this one of it.
DISTMK_FN uint32_t stage_in_group() { return threadIdx.x / 32 / K_TILES_PER_STAGE; }
DISTMK_FN uint32_t tile_in_stage() { return own_warp() % K_TILES_PER_STAGE; }

DISTMK_FN uint32_t stages_of_group(uint32_t block_k) { return (block_k + STAGE_K - 1) / STAGE_K; }

// Where a warp finds its tile of a stage.
DISTMK_FN const char* tile_of(const PipelineState<NUM_STAGES>& stage, uint32_t group_rows) {
  return shared().slots + stage.index * STAGE_BYTES + tile_in_stage() * K_TILE * group_rows * sizeof(__nv_bfloat16);
}

// The warp with a stage's last tile gives back what tiles are missing in it.
DISTMK_FN void consumer_release(const PipelineState<NUM_STAGES>& stage, uint32_t block_k) {
  const bool last = first_column() + K_TILE >= block_k;
  warp_arrive(&shared().ring.empty[stage.index], last ? K_TILES_PER_STAGE - tile_in_stage() : 1);
}

// By conditions, not by zeros: half as many instructions.
template <uint32_t N_TILES>
DISTMK_FN void add_tile(const float (&tile)[N_TILES][4], uint32_t group, typename Round<N_TILES>::Sums& sums) {
#pragma unroll
  for (uint32_t g = 0; g < M_TILES_PER_BLOCK; ++g)
#pragma unroll
    for (uint32_t t = 0; t < N_TILES; ++t)
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i)
        if (g == group) sums[g][t][i] += tile[t][i];
}

static_assert(K_BLOCK / STAGE_K <= PipelineState<NUM_STAGES>::MOST_STEPS, "stages of a group");

// A warp's part of a block of `block_k` columns, from group `group` of the round on, of which `stage` is the first.
template <uint32_t N_TILES>
DISTMK_FN void multiply_block(const Column<N_TILES>& x, const Lane& lane, const Round<N_TILES>& round, uint32_t block_k,
                              uint32_t group, PipelineState<NUM_STAGES>& stage, typename Round<N_TILES>::Sums& sums) {
  const uint32_t num_rows = round.end_row - round.first_row, num_stages = stages_of_group(block_k);
#pragma unroll 1
  for (; group * M_TILE < num_rows; ++group, stage = stage.advanced(num_stages)) {
    if (first_column() >= block_k) continue;
    const PipelineState<NUM_STAGES> at = stage.advanced(stage_in_group());
    float tile_sums[N_TILES][4] = {};
    barrier_wait(&shared().ring.full[at.index], at.phase);
    multiply_tile<N_TILES>(tile_of(at, min(M_TILE, num_rows - group * M_TILE)), min(K_TILE, block_k - first_column()),
                           x, lane, tile_sums);
    consumer_release(at, block_k);
    add_tile<N_TILES>(tile_sums, group, sums);
  }
}

// A slab's first group of rows in its first block, taken into registers before there are activations to multiply it
// with: the loader has that much more room while everybody waits. If all tiles of it are whole ones.
struct EarlyTile {
  HeldTile tile;
  uint32_t num_groups = 0;  // that are taken by all warps together

  DISTMK_FN void take(const LinearArgs& args, uint32_t rows, PipelineState<NUM_STAGES>& stage, const Lane& lane) {
    const uint32_t block_k = min(K_BLOCK, args.k_pitch);
    num_groups = block_k % K_TILE == 0;
    if (!num_groups || first_column() >= block_k) {
      tile.clear();  // or the compiler would keep its registers for whatever they hold, in all other tasks too
    } else {
      const PipelineState<NUM_STAGES> at = stage.advanced(stage_in_group());
      barrier_wait(&shared().ring.full[at.index], at.phase);
      tile.load(tile_of(at, min(M_TILE, rows)), lane);
      consumer_release(at, block_k);
    }
    if (num_groups) stage = stage.advanced(stages_of_group(block_k));
  }
  // Zeros give zeros.
  DISTMK_FN void multiply(const Column<1>& x, Round<1>::Sums& sums) const { tile.multiply(x, sums[0]); }
};

}  // namespace linear
}  // namespace distmk
