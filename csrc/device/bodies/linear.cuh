// Linear layers on tensor cores: rows of weights are the m dimension, tokens the n dimension, so that up to eight
// tokens cost little more than one. Activations are bf16, sums are float32.
#pragma once
#include "device/lone_row.cuh"
#include "device/weight_tiles.cuh"

namespace distmk {
namespace linear {

// The slab comes in rounds of ROUND_GROUPS row groups, a round in blocks of BLOCK_K columns, a block group by group,
// stage by stage. Of up to a tile of rows the next block's activations are on their way while one is multiplied; of
// more there are not enough registers. But for unaligned ones nothing lives across a call, which would put it on the
// stack. Of more than a tile of rows all is written behind the task's events, on which those who add it up count.
template <uint32_t TILES, bool ALIGNED>
DISTMK_FN void run(Context& context, const LinearArgs& args, uint32_t num_rows) {
  constexpr bool AHEAD = TILES == 1 && ALIGNED;
  const Team& team = context.team;
  const uint32_t rows = slab_rows(args);
  Activations a = activations_of(context, args, num_rows);
  const Lane lane;
  const Output<TILES> out(context, args, num_rows);
  Places places = shared().places[threadIdx.x / 32];
  typename Round<TILES>::Sums sums = {};
  Column<TILES> x;
  uint32_t group = 0;
  // Whether blocks of activations are looked at until they are there.
  bool looks = ALIGNED && args.arriving;
  if constexpr (AHEAD) {
    const bool near = fit_near(args, num_rows);
    LoneRow lone(context, args, near, looks, first_column());
    EarlyTile early;
    early.take(args, rows, places.stage, lane);
    // What was taken is not in the ring any more.
    if (looks)
      context.look_for_inputs();
    else if (!context.inputs_ready())
      return keep_places(places);
    if (lone.is_there()) {
      lone.bring(near_memory());
      context.inputs_found();
      use_near(a);
    } else if (near) {
      bring_near(context, a, looks, first_column());
    }
    looks = looks && !near;
    x.load_there(context, looks, a, first_column());
    x.clear_behind(a, first_column());
    early.multiply(x, sums);
    group = early.num_groups;
  } else {
    if (looks)
      context.look_for_inputs();
    else if (!context.inputs_ready())
      return;
    if constexpr (ALIGNED)
      x.load_there(context, looks, a, first_column());
    else
      x.template load<ALIGNED>(a, first_column());
  }
  out.start();
#pragma unroll 1
  for (uint32_t first = 0; first < rows; first += ROUND_ROWS) {
    Round<TILES> round(out, first, min(first + ROUND_ROWS, rows));
#pragma unroll 1
    for (uint32_t block = 0; block < args.k_pitch; block += BLOCK_K) {
      const uint32_t block_end = min(block + BLOCK_K, args.k_pitch);
      const uint32_t next_block = block_end < args.k_pitch ? block_end : round.end_row < rows ? 0 : a.spare_block;
      Column<TILES> next;
      if constexpr (AHEAD)
        next.load_there(context, looks, a, next_block + first_column());
      else
        x.clear_behind(a, block + first_column());
      if (args.normalized && first == 0) add_squares(x, block == 0);
      multiply_block<TILES>(x, lane, round, block_end - block, group, places.stage, sums);
      group = 0;
      if constexpr (AHEAD) {
        (x = next).clear_behind(a, next_block + first_column());
      } else {
        if constexpr (ALIGNED)
          x.load_there(context, looks && block_end < args.k_pitch, a, next_block + first_column());
        else
          x.template load<ALIGNED>(a, next_block + first_column());
      }
    }
    if (!AHEAD) context.inputs_ready();  // before anything is written
    looks = false;
    const bool holds = round.end_row == rows && is_awaited(context.rank_state, args);
    hand_over(round, sums, out, places.sums, holds ? shared().num_slabs[threadIdx.x / 32].get() + 1 : 0);
    memset(sums, 0, sizeof(sums));
  }
  if (out.epilogue() == Epilogue::ARGMAX) {
    team.sync();
    write_candidates<TILES>(out);
  }
  keep_places(places);
}

template <bool ALIGNED>
DISTMK_FN void run_by_rows(Context& context, const LinearArgs& args, uint32_t rows) {
  if (rows <= TILE_TOKENS)
    run<1, ALIGNED>(context, args, rows);
  else
    run<2, ALIGNED>(context, args, rows);
}

}  // namespace linear

DISTMK_FN void body_linear(Context& context, const LinearArgs& args) {
  const uint32_t rows = linear::num_rows(context.rank_state, args);
  if (linear::is_aligned(context.rank_state, args, rows))
    linear::run_by_rows<true>(context, args, rows);
  else
    linear::run_by_rows<false>(context, args, rows);
  if (args.epilogue == static_cast<uint32_t>(Epilogue::PUSH) && context.rank_state.far && context.inputs_ready())
    context.push_far(args.out, uint64_t{rows} * args.n * sizeof(float));
}

}  // namespace distmk
