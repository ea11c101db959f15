// Linear layers on tensor cores: rows of weights are the m dimension, tokens the n dimension, so that up to eight
// tokens cost little more than one. Activations are rounded to bf16, sums are float32.
#pragma once
#include "device/weight_tiles.cuh"

namespace distmk {
namespace linear {

// The launch is over: what was taken early is not there any more when the ring is emptied.
DISTMK_FN void leave_early(Places& places, const EarlyTile& early) {
  places.stage = places.stage.after(early.num_stages);
  if (threadIdx.x % 32 == 0) shared().places[threadIdx.x / 32] = places;
}

// The slab comes in rounds of ROUND_GROUPS row groups, a round in blocks of BLOCK_K columns, a block group by group,
// stage by stage. But for Rows::ANY nothing lives across a call, which would put it on the stack.
template <uint32_t TILES, Rows ROWS>
DISTMK_FN void run(Context& context, const LinearArgs& args, uint32_t num_rows) {
  constexpr bool SINGLE = ROWS == Rows::ONE;
  const Team& team = context.team;
  const uint32_t rows = slab_rows(args);
  const Activations x = activations_of(context, args, num_rows);
  const Lane<TILES> lane(x);
  Output<TILES> out(context, args, num_rows);
  Places places = shared().places[threadIdx.x / 32];
  ++places.num_slabs;
  uint32_t turn = first_turn(), num_staged = 0;
  typename Round<TILES>::Sums sums = {};
  BlockStager<TILES * TILE_TOKENS, ROWS == Rows::ALIGNED> stager(team, x);
  if constexpr (SINGLE) {
    EarlyTile early;
    early.take(args, rows, places.stage, lane);
    if (!stage_row(context, x)) return leave_early(places, early);
    team.sync();
    early.multiply(lane, sums);
    if (early.has_tile()) turn += STAGE_TEAMS;
  } else {
    if (!context.inputs_ready()) return;
    stager.load(0);
  }
#pragma unroll 1
  for (uint32_t first = 0; first < rows; first += ROUND_ROWS) {
    const Round<TILES> round(out, first, min(first + ROUND_ROWS, rows));
#pragma unroll 1
    for (uint32_t block = 0; block < args.k_pitch; block += BLOCK_K) {
      const uint32_t block_end = min(block + BLOCK_K, args.k_pitch);
      const uint32_t place = SINGLE ? block : x.place_of(block, num_staged);
      if (!SINGLE && (first == 0 || !x.resident)) {
        if (x.overwrites()) team.sync();
        stager.store(place, args.norm && first == 0);
        ++num_staged;
        const bool last = block_end >= args.k_pitch;
        if (!last || (round.end_row < rows && !x.resident)) stager.load(last ? 0 : block_end);
        team.sync();
      }
      multiply_block<TILES>(place, lane, round, block, block_end, places.stage, turn, sums);
    }
    if (!SINGLE && args.norm && first == 0) stager.keep_all_squares();
    if (team.leader() && round.end_row == rows)
      shared().ring.hold.set(places.num_slabs);  // until the clerk has signalled
    hand_over(round, sums, out, places.sums);
    memset(sums, 0, sizeof(sums));
  }
  if (out.epilogue() == Epilogue::ARGMAX) {
    team.sync();
    write_candidates<TILES>(out);
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) shared().places[threadIdx.x / 32] = places;
}

}  // namespace linear

DISTMK_FN void body_linear(Context& context, const LinearArgs& args) {
  const uint32_t num_rows = linear::num_rows(context.rank_state, args);
  if (num_rows <= TILE_TOKENS)
    linear::run<1, linear::Rows::ANY>(context, args, num_rows);
  else
    linear::run<2, linear::Rows::ANY>(context, args, num_rows);
  if (args.epilogue == static_cast<uint32_t>(Epilogue::PUSH))
    context.push_far(args.out, uint64_t{num_rows} * args.n * sizeof(float));
}

}  // namespace distmk
