// A split of a single row, where heads have as many elements as the compiler knows: what a token waits for in such a
// task is, for the most part, instructions one after another, so there are none here that it does not need.
#pragma once
#include "device/attention/kv_pipeline.cuh"
#include "device/attention/output.cuh"
#include "device/attention/work_assignment.cuh"
#include "device/core/marks.cuh"

namespace distmk {
namespace attention {

// The batch's only row, of which each warp has one chunk at most, straight from the cache.
template <uint32_t DIM>
DISTMK_FN void take(const LoneWork<DIM>& w, Tile& tile) {
  const uint32_t turn = w.chunk_turn();
  if (turn >= w.num_chunks())
    return tile.clear();  // or the compiler would keep its registers for whatever they hold, in all other tasks too
  const uint64_t begin = uint64_t{shared().attention_assignment.lines[turn]} * DIM;
  KeyPieces<LoneWork<DIM>, FromCache>(w, w.keys() + begin).load(tile);
  ValuePieces<LoneWork<DIM>, FromCache>(w, w.values() + begin).load(tile);
}
template <uint32_t DIM>
DISTMK_FN void attend(const LoneWork<DIM>& w, Tile& tile, Partial& partial) {
  const uint32_t turn = w.chunk_turn(), chunk = w.chunk_of(turn);
  if (turn >= w.num_chunks()) return;
  if (turn == 0) patch_keys(w, chunk, tile);
  float scores[2][4] = {};
  multiply_keys(w, [&](uint32_t i, uint32_t j) { return tile.k[i][j]; }, scores);
  uint32_t weights[1][2][2];
  partial.template weigh<true>(chunk, w.begin, w.end, false, scores, weights);
  if (turn == 0) patch_values(w, chunk, tile);
  partial.add_values(tile, DIM, weights[0]);
}

// Any row, through the ring.
template <uint32_t DIM>
DISTMK_FN void take(const RowWork<DIM>& w, Tile& tile) {
  ChunkStages<RowWork<DIM>>(w).take(tile);
}
template <uint32_t DIM>
DISTMK_FN void attend(const RowWork<DIM>& w, Tile& tile, Partial& partial) {
  attend_ring(w, tile, partial);
}

// False: the launch was over before its inputs were there.
template <class W>
DISTMK_FN bool run_row(Context& context, const AttentionArgs& args) {
  const AttentionAssignment& share = shared().attention_assignment;
  const W w{share.split, context, args};
  const uint32_t warp = threadIdx.x / 32;
  Tile tile;
  take(w, tile);
  mark(Mark::PREPARED);
  if (args.polls)
    context.begin_polling();
  else if (!context.inputs_ready())
    return false;
  stage_queries(w, 0, w.num_heads, args.polls);
  stage_new(w, w.num_heads, args.polls);
  context.inputs_polled();
  mark(Mark::INPUTS);
  context.team.sync();
  Partial partial;
  attend(w, tile, partial);
  mark(Mark::LAST);
  partial.add_up();
#pragma unroll
  for (uint32_t first = 0; first < QUERIES; first += COMBINED_QUERIES) {
    if (first >= w.num_heads) break;
    if (first) context.team.sync();
    const uint32_t end = min(first + COMBINED_QUERIES, w.num_heads);
    partial.write(w.combined(opaque(w.chunk_turn()), 0), first, end);
    void* partials = first + warp < end ? part_of(w, first + warp) : nullptr;
    context.team.sync();
    if (first == 0) mark(Mark::MET);
    if (partials) write_query(w, warp, partials);
  }
  mark(Mark::STORED);
  reset_fused_partials(w);
  append(w, [&](uint32_t) { return share.new_line; });
  return true;
}

}  // namespace attention
}  // namespace distmk
