// A split of a lone row of which each warp has one chunk at most: what a token waits for in such a task is, for the
// most part, instructions one after another, so there are none here that it does not need.
#pragma once
#include "device/attention_output.cuh"
#include "device/attention_share.cuh"
#include "device/marks.cuh"

namespace distmk {
namespace attention {

// A chunk of the cache, whose lines are one behind the other, as pages are of whole chunks. Pieces are exchanged among
// eight positions and 64 elements, so a lane needs four addresses; the rest the loads themselves add to them.
DISTMK_FN void load_lines(const NearWork& w, uint32_t first_line, Tile& tile) {
  constexpr uint32_t EIGHT_LINES = 8 * MAX_HEAD_DIM;
  const uint32_t lane = w.lane();
  const uint64_t begin = uint64_t{first_line} * MAX_HEAD_DIM;
  const auto at = [&](const __nv_bfloat16* cache, uint32_t position, uint32_t element) {
    return cache + begin + position * MAX_HEAD_DIM + place_in_line(w, element, w.exchanged(position));
  };
  const __nv_bfloat16 *keys[2], *values[2];
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    keys[i] = at(w.keys(), key_place(lane, 0), key_element(lane, i));
    values[i] = at(w.values(), value_place(lane, i), value_element(lane, 0));
  }
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i)
#pragma unroll
    for (uint32_t j = 0; j < MAX_HEAD_DIM / 32; ++j)
      tile.k[i][j] = load_perhaps(reinterpret_cast<const uint4*>(keys[j % 2] + i * EIGHT_LINES + j / 2 * 64));
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i)
#pragma unroll
    for (uint32_t j = 0; j < MAX_HEAD_DIM / 64; ++j)
      tile.v[i][j] = load_perhaps(reinterpret_cast<const uint4*>(values[i % 2] + i / 2 * EIGHT_LINES + j * 64));
}

// Positions before the split's, where it begins within a chunk, are old ones: they weigh nothing. Only the first turn's
// may be new or nobody's.
DISTMK_FN void attend_chunk(const NearWork& w, Tile& tile, Partial& partial) {
  const uint32_t turn = w.chunk_turn(), chunk = w.chunk_of(turn);
  if (turn == 0) patch_keys(w, chunk, tile);
  float scores[2][4] = {};
  multiply_keys(w, [&](uint32_t i, uint32_t j) { return tile.k[i][j]; }, scores);
  uint32_t weights[1][2][2];
  partial.weigh<true>(chunk, w.begin, w.end, false, scores, weights);
  if (turn == 0) patch_values(w, chunk, tile);
  partial.add_values(tile, MAX_HEAD_DIM, weights[0]);
}

// False: the launch was over before its inputs were there.
DISTMK_FN bool run_near(Context& context, const AttentionArgs& args) {
  const AttentionShare& share = shared().attention_share;
  const NearWork w{share.split, context, args};
  const uint32_t warp = threadIdx.x / 32, turn = w.chunk_turn();
  const bool has_chunk = turn < w.num_chunks();
  Tile tile;
  if (has_chunk)
    load_lines(w, share.lines[turn], tile);
  else
    tile.clear();  // or the compiler would keep its registers for whatever they hold, in all other tasks too
  mark(Mark::PREPARED);
  if (args.arriving)
    context.look_for_inputs();
  else if (!context.inputs_ready())
    return false;
  stage_queries(w, 0, w.num_heads, args.arriving);
  stage_new(w, w.num_heads, args.arriving);
  context.inputs_found();
  mark(Mark::INPUTS);
  context.team.sync();
  Partial partial;
  if (has_chunk) attend_chunk(w, tile, partial);
  mark(Mark::LAST);
  partial.add_up();
#pragma unroll
  for (uint32_t first = 0; first < QUERIES; first += MERGED_QUERIES) {
    if (first >= w.num_heads) break;
    if (first) context.team.sync();
    const uint32_t end = min(first + MERGED_QUERIES, w.num_heads);
    partial.write(w.merged(opaque(turn), 0), first, end);
    void* part = first + warp < end ? part_of(w, first + warp) : nullptr;
    context.team.sync();
    if (first == 0) mark(Mark::MET);
    if (part) write_query(w, warp, part);
  }
  mark(Mark::STORED);
  clear_lone(w);
  append(w, [&](uint32_t) { return share.new_line; });
  return true;
}

}  // namespace attention
}  // namespace distmk
