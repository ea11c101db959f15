// Linear layers on tensor cores: rows of weights are the m dimension, tokens the n dimension, so that up to eight
// tokens cost little more than one. Activations are bf16, sums are float32.
#pragma once
#include "device/linear/fused_combine.cuh"
#include "device/linear/mainloop.cuh"

namespace distmk {
namespace linear {

// The slab comes in rounds of M_TILES_PER_BLOCK row groups, a round in blocks of K_BLOCK columns, a block group by
// group, stage by stage. Nothing lives across a call, which would put it on the stack, but for unaligned activations.

// What becomes of a round's sums, which are zero again then.
template <uint32_t N_TILES, bool ROW>
DISTMK_FN void end_round(Round<N_TILES>& round, uint32_t rows, typename Round<N_TILES>::Sums& sums,
                         const Output<N_TILES>& out, ConsumerState& consumer) {
  mark(Mark::LAST);
  reduce_split_k<N_TILES, ROW>(round, sums, out, consumer.reduction_round, rows);
  memset(sums, 0, sizeof(sums));
}

// A single row whose activations fit into shared memory, by itself: what a token waits for in such a task is, for the
// most part, instructions one after another, so there are none here that it does not need.
DISTMK_FN void run_gemv(Context& context, const LinearArgs& args) {
  const uint32_t rows = slab_rows(args);
  const Lane lane;
  const Output<1> out(context, args, 1);
  ConsumerState consumer = consumer_state();
  Round<1>::Sums sums = {};
  Column<1> x;
  LoneRow fused_partials(context, args, args.polls, first_column());
  EarlyTile early;
  early.take(args, rows, consumer.stage, lane);
  mark(Mark::PREPARED);
  // What was taken is not in the ring any more.
  if (args.polls)
    context.begin_polling();
  else if (!context.inputs_ready())
    return store_consumer_state(consumer);
  if (fused_partials.is_there())
    fused_partials.bring(gemv_input());
  else
    stage_gemv_input(context, activations_of(context, args, 1), args.polls, first_column());
  context.inputs_polled();
  __syncwarp();
  mark(Mark::INPUTS);
  x.load_from_shared(args.k, first_column());
  early.multiply(x, sums);
  uint32_t group = early.num_groups;
#pragma unroll 1
  for (uint32_t first = 0; first < rows; first += M_BLOCK) {
    Round<1> round(out, first, min(first + M_BLOCK, rows));
#pragma unroll 1
    for (uint32_t block = 0; block < args.k_pitch; block += K_BLOCK) {
      const uint32_t block_end = min(block + K_BLOCK, args.k_pitch);
      if (args.normalized && first == 0) add_squares(x, block == 0);
      if (first + block == 0) mark(Mark::FIRST);
      multiply_block<1>(x, lane, round, block_end - block, group, consumer.stage, sums);
      group = 0;
      x.load_from_shared(args.k, (block_end < args.k_pitch ? block_end : 0) + first_column());
    }
    end_round<1, true>(round, rows, sums, out, consumer);
  }
  store_consumer_state(consumer);
}

// Of up to a tile of rows the next block's activations are on their way while one is multiplied; of more there are not
// enough registers, and all is written behind the task's events, on which those who add it up count.
template <uint32_t N_TILES, bool ALIGNED>
DISTMK_FN void run(Context& context, const LinearArgs& args, uint32_t num_rows) {
  constexpr bool AHEAD = N_TILES == 1 && ALIGNED;
  const uint32_t rows = slab_rows(args);
  const Activations a = activations_of(context, args, num_rows);
  const Lane lane;
  const Output<N_TILES> out(context, args, num_rows);
  ConsumerState consumer = consumer_state();
  typename Round<N_TILES>::Sums sums = {};
  Column<N_TILES> x;
  uint32_t group = 0;
  // Whether blocks of activations are looked at until they are there.
  bool looks = ALIGNED && args.polls;
  EarlyTile early;
  if constexpr (AHEAD) early.take(args, rows, consumer.stage, lane);
  mark(Mark::PREPARED);
  if (looks)
    context.begin_polling();
  else if (!context.inputs_ready())
    return store_consumer_state(consumer);
  x.template load_there<ALIGNED>(context, looks, a, first_column());
  mark(Mark::INPUTS);
  if constexpr (AHEAD) {
    x.clear_behind(a.k, first_column());
    early.multiply(x, sums);
    group = early.num_groups;
  }
  out.start();
#pragma unroll 1
  for (uint32_t first = 0; first < rows; first += M_BLOCK) {
    Round<N_TILES> round(out, first, min(first + M_BLOCK, rows));
#pragma unroll 1
    for (uint32_t block = 0; block < args.k_pitch; block += K_BLOCK) {
      const uint32_t block_end = min(block + K_BLOCK, args.k_pitch);
      const uint32_t next_block = block_end < args.k_pitch ? block_end : round.end_row < rows ? 0 : args.k;
      Column<N_TILES> next;
      if constexpr (AHEAD)
        next.template load_there<ALIGNED>(context, looks, a, next_block + first_column());
      else
        x.clear_behind(a.k, block + first_column());
      if (args.normalized && first == 0) add_squares(x, block == 0);
      if (first + block == 0) mark(Mark::FIRST);
      multiply_block<N_TILES>(x, lane, round, block_end - block, group, consumer.stage, sums);
      group = 0;
      if constexpr (AHEAD)
        (x = next).clear_behind(a.k, next_block + first_column());
      else if (block_end < args.k_pitch)
        x.template load_there<ALIGNED>(context, looks, a, next_block + first_column());
    }
    if constexpr (!AHEAD) {
      context.inputs_ready();  // before anything is written, and what lies there is loaded once more
      x.template load<ALIGNED>(a, (round.end_row < rows ? 0 : args.k) + first_column());
    }
    looks = false;
    if (N_TILES == 1 && num_rows == 1 && out.epilogue() != Epilogue::ARGMAX)
      end_round<N_TILES, N_TILES == 1>(round, rows, sums, out, consumer);
    else
      end_round<N_TILES, false>(round, rows, sums, out, consumer);
  }
  if (out.epilogue() == Epilogue::ARGMAX) {
    context.team.sync();
    write_candidates<N_TILES>(out);
  }
  store_consumer_state(consumer);
}

template <bool ALIGNED>
DISTMK_FN void run_by_rows(Context& context, const LinearArgs& args, uint32_t rows) {
  if (ALIGNED && fits_gemv(args, rows))
    run_gemv(context, args);
  else if (rows <= N_TILE)
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
  if (args.epilogue == static_cast<uint32_t>(Epilogue::PUSH) && context.rank_state.transport && context.inputs_ready())
    context.push_remote(args.out, uint64_t{rows} * args.n * sizeof(float));
}

}  // namespace distmk
