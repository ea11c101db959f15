// Split-KV attention over the paged cache, on tensor cores. A query and a softmax weight are each two bf16, high and
// low half, so nothing is lost to rounding but the cache's own. A warp takes CHUNK positions at a time; what the warps
// have found is merged in shared memory, in a fixed order.
#pragma once
#include "device/attention/decode_row.cuh"

namespace distmk {
namespace attention {

// One block of queries over this warp's chunks, of which the first is on its way.
DISTMK_FN void attend(const Work& w, uint32_t first_query, Tile& tile, Partial& partial) {
  const uint32_t last = w.first_new() + w.row_of(first_query + group_of_lane());  // position this query may see
  uint32_t next_lines = look_up(w, w.chunk_turn() + NUM_WARPS);
#pragma unroll 1
  for (uint32_t turn = w.chunk_turn(); turn < w.num_chunks(); turn += NUM_WARPS) {
    const uint32_t chunk = w.chunk_of(turn);
    const bool whole = is_cached(w, chunk), more = turn + NUM_WARPS < w.num_chunks();
    const CachedLines lines{w, next_lines};
    next_lines = look_up(w, turn + 2 * NUM_WARPS);
    if (!whole) patch_keys(w, chunk, tile);
    float scores[2][4] = {};
    multiply_keys(w, [&](uint32_t i, uint32_t j) { return tile.k[i][j]; }, scores);
    if (more) load_keys(w, lines, tile);
    uint32_t weights[1][2][2];
    partial.weigh<false>(chunk, w.begin, min(w.end, last + 1), false, scores, weights);
    if (!whole) patch_values(w, chunk, tile);
    partial.add_values(tile, w.head_dim(), weights[0]);
    if (more) load_values(w, lines, tile);
  }
}

// False: the launch was over before its inputs were there.
DISTMK_FN bool run_instance(Context& context, const AttentionArgs& args) {
  const uint32_t round = own_round();
  const AttentionSplit split =
      at_hand(round) ? shared().attention_assignment.split : split_of(context, args, instance_of(context, round));
  const Work w{split, context, args};
  const Team& team = context.team;
  const uint32_t num_queries = w.num_queries(), warp = threadIdx.x / 32;
  const bool has_chunk = w.chunk_turn() < w.num_chunks();
#pragma unroll 1
  for (uint32_t block = 0; block < num_queries; block += QUERIES) {
    const uint32_t count = min(QUERIES, num_queries - block);
    Tile tile;
    if (has_chunk) {
      const CachedLines lines{w, at_hand(own_round()) ? lines_at_hand(w.chunk_turn()) : look_up(w, w.chunk_turn())};
      load_keys(w, lines, tile);
      load_values(w, lines, tile);
    } else {
      tile.clear();  // or the compiler would keep its registers for whatever they hold, in all other tasks too
    }
    mark(Mark::PREPARED);
    // Old positions were there before. New ones are read by all warps of this instance, and by no other this iteration.
    if (args.polls)
      context.begin_polling();
    else if (!context.inputs_ready())
      return false;
    if (block == 0) reset_fused_partials(w);
    stage_queries(w, block, count, args.polls);
    if (block == 0) stage_new(w, count, args.polls);
    context.inputs_polled();
    mark(Mark::INPUTS);
    team.sync();
    Partial partial;
    attend(w, block, tile, partial);
    mark(Mark::LAST);
    team.sync();
    mark(Mark::MET);
    partial.add_up();
#pragma unroll
    for (uint32_t first = 0; first < QUERIES; first += COMBINED_QUERIES) {
      if (first >= count) break;
      const uint32_t end = min(first + COMBINED_QUERIES, count);
      partial.write(w.combined(opaque(w.chunk_turn()), 0), first, end);
      void* partials = first + warp < end ? part_of(w, block + first + warp) : nullptr;
      team.sync();
      if (partials) write_query(w, warp, partials);
      team.sync();
    }
  }
  mark(Mark::STORED);
  // A single one's line is at hand: who runs a merge next would be late by the trip for its page.
  const auto line_of = [&](uint32_t position) {
    return w.run.num_rows == 1 && at_hand(own_round()) ? shared().attention_assignment.new_line : w.line_of(position);
  };
  append(w, line_of);
  return true;
}

}  // namespace attention

// This worker's share of a spread task, or the one instance that was handed out. What it goes by it reads anew for
// every instance: kept in registers, it would lie on the stack.
DISTMK_FN void body_attention(Context& context, const AttentionArgs& args) {
  using namespace attention;
  const auto have = [&](uint32_t round) {
    if (!is_spread(*context.task.desc)) return round == 0;
    return instance_of(context, round) < count_instances(context, args);
  };
  if (!have(0)) return context.inputs_polled();
  const auto run = [&] {
    switch (at_hand(own_round())) {
      case NEAR:
        return run_row<LoneWork<MAX_HEAD_DIM>>(context, args);
      case PIPELINED:
        return args.head_dim == MAX_HEAD_DIM ? run_row<RowWork<MAX_HEAD_DIM>>(context, args)
                                             : run_row<RowWork<MAX_HEAD_DIM / 2>>(context, args);
      default:
        return run_instance(context, args);
    }
  };
  while (run() && have(own_round() + 1)) {
    set_own_round(own_round() + 1);
    context.team.sync();  // what was staged may lie there until now
  }
  if (own_round()) set_own_round(0);
}

}  // namespace distmk
