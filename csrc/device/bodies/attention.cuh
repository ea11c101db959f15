// Split-KV attention over the paged cache, on tensor cores. A query and a softmax weight are each two bf16, high and
// low half, so nothing is lost to rounding but the cache's own. A warp takes CHUNK positions at a time; what the warps
// have found is merged in shared memory, in a fixed order.
#pragma once
#include "device/attention_ring.cuh"
#include "device/attention_share.cuh"
#include "device/attention_tile.cuh"
#include "device/marks.cuh"

namespace distmk {
namespace attention {

constexpr uint32_t PART_LANES = MERGE_SLICE / 4;  // whose elements are a slice of a query's result

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
    partial.weigh(chunk, w.begin, min(w.end, last + 1), false, scores, weights);
    if (!whole) patch_values(w, chunk, tile);
    partial.add_values(tile, w.args.head_dim, weights[0]);
    if (more) load_values(w, lines, tile);
  }
}

// Where this lane's four elements of a query's result lie, behind a header. Asked for before the warps meet: some have
// nothing else to do.
DISTMK_FN void* part_of(const Work& w, uint32_t query) {
  const uint32_t lane = threadIdx.x % 32, slices = (w.args.head_dim + MERGE_SLICE - 1) / MERGE_SLICE;
  if (is_lone(w.args, w.num_rows, w.run))
    return w.lone_at(w.args.lone, query, w.instance.split) + LONE_HEADER + 4 * lane;
  const uint32_t row = w.row_of(query), slice = (w.first_head + query - row * w.num_heads) * slices + lane / PART_LANES;
  return w.context.at<float>(w.args.part) + slice * slice_floats(w.args.max_splits) +
         part_begin(w.run.row_begin + row, w.instance.split, w.args.max_splits) + PART_HEADER + lane % PART_LANES * 4;
}

// Merges the warps' results for a query and writes them out; a warp a query, four elements a lane. All maxima and sums
// are read at once, and so are some of the results; of warps that had no chunk they weigh nothing.
DISTMK_FN void write_query(const Work& w, uint32_t index, void* out) {
  constexpr uint32_t AT_ONCE = NUM_WARPS / 2;
  const uint32_t lane = threadIdx.x % 32;
  const auto found_by = [&](uint32_t turn) { return w.merged(turn, index); };
  float tops[NUM_WARPS], sums[NUM_WARPS], maximum = -INFINITY, sum = 0;
#pragma unroll
  for (uint32_t turn = 0; turn < NUM_WARPS; ++turn) {
    const float2 found = *reinterpret_cast<const float2*>(found_by(turn) + MAX_HEAD_DIM);
    tops[turn] = found.x, sums[turn] = found.y;
    maximum = fmaxf(maximum, tops[turn]);
  }
  const float base = maximum > -INFINITY ? maximum : 0.0f;
  float4 acc = {0, 0, 0, 0};
#pragma unroll
  for (uint32_t first = 0; first < NUM_WARPS; first += AT_ONCE) {
    if (first >= w.num_chunks()) break;
    float4 more[AT_ONCE];
#pragma unroll
    for (uint32_t i = 0; i < AT_ONCE; ++i) more[i] = *reinterpret_cast<const float4*>(found_by(first + i) + 4 * lane);
#pragma unroll
    for (uint32_t i = 0; i < AT_ONCE; ++i) {
      const float weight = __expf(tops[first + i] - base);
      sum += sums[first + i] * weight;
      acc.x += more[i].x * weight, acc.y += more[i].y * weight, acc.z += more[i].z * weight,
          acc.w += more[i].w * weight;
    }
  }
  if (4 * lane >= w.args.head_dim) return;
  if (is_lone(w.args, w.num_rows, w.run)) {
    const float scale = __fdividef(1.0f, sum);
    const uint32_t pairs[2] = {pack_bf16(acc.x * scale, acc.y * scale), pack_bf16(acc.z * scale, acc.w * scale)};
    store_arriving(static_cast<uint2*>(out), {arrived_pair(pairs[0]), arrived_pair(pairs[1])});
    // Last: who waits looks at it alone.
    if (lane == 0)
      store_element(reinterpret_cast<float*>(static_cast<__nv_bfloat16*>(out) - LONE_HEADER), maximum + __logf(sum));
    return;
  }
  if (lane % PART_LANES == 0) store_four(static_cast<float*>(out) - PART_HEADER, {maximum, sum, 0, 0});
  store_four(static_cast<float*>(out), acc);
}

// Leaves zero what splits of a lone row may have left a turn before, as many as there were then: a warp a head.
DISTMK_FN void clear_lone(const Work& w) {
  const uint32_t lane = threadIdx.x % 32;
  if (!w.args.cleared || w.instance.run != 0 || 4 * lane >= w.args.head_dim) return;
#pragma unroll 1
  for (uint32_t query = threadIdx.x / 32; query < w.num_heads; query += NUM_WARPS)
#pragma unroll 1
    for (uint32_t split = w.instance.split; split < max_lone_splits(w.args.max_splits);
         split += w.instance.num_splits) {
      __nv_bfloat16* out = w.lone_at(w.args.cleared, query, split);
      if (lane == 0) store_arriving(reinterpret_cast<float*>(out), 0.0f);
      store_arriving(reinterpret_cast<uint2*>(out + LONE_HEADER) + lane, {0, 0});
    }
}

// False: the launch was over before its inputs were there.
DISTMK_FN bool run_instance(Context& context, const AttentionArgs& args) {
  const uint32_t round = own_round();
  const AttentionSplit split =
      at_hand(round) ? shared().attention_share.split : split_of(context, args, instance_of(context, round));
  const Work w{split, context, args};
  // Looked up anew, here and below, or it would lie on the stack.
  const bool in_ring = at_hand(opaque(round)) == IN_RING;
  const Team& team = context.team;
  const uint32_t num_queries = w.num_queries(), warp = threadIdx.x / 32;
  const bool has_chunk = w.chunk_turn() < w.num_chunks();
#pragma unroll 1
  for (uint32_t block = 0; block < num_queries; block += QUERIES) {
    const uint32_t count = min(QUERIES, num_queries - block);
    Tile tile;
    if (in_ring) {
      take_first(w, tile);
    } else if (has_chunk) {
      const CachedLines lines{w, at_hand(own_round()) ? lines_at_hand(w.chunk_turn()) : look_up(w, w.chunk_turn())};
      load_chunk(w, lines, tile);
    } else {
      tile.clear();  // or the compiler would keep its registers for whatever they hold, in all other tasks too
    }
    mark(Mark::PREPARED);
    // Old positions were there before. New ones are read by all warps of this instance, and by no other this iteration.
    if (args.arriving)
      context.look_for_inputs();
    else if (!context.inputs_ready())
      return false;
    if (block == 0) clear_lone(w);
    stage_queries(w, block, count, args.arriving);
    if (block == 0) stage_new(w, count, args.arriving);
    context.inputs_found();
    mark(Mark::INPUTS);
    team.sync();
    Partial partial;
    if (in_ring)
      attend_ring(w, block, tile, partial);
    else
      attend(w, block, tile, partial);
    mark(Mark::LAST);
    team.sync();
    mark(Mark::MET);
    partial.add_up();
#pragma unroll
    for (uint32_t first = 0; first < QUERIES; first += MERGED_QUERIES) {
      if (first >= count) break;
      const uint32_t end = min(first + MERGED_QUERIES, count);
      partial.write(w.merged(opaque(w.chunk_turn()), 0), first, end);
      void* part = first + warp < end ? part_of(w, block + first + warp) : nullptr;
      team.sync();
      if (part) write_query(w, warp, part);
      team.sync();
    }
  }
  mark(Mark::STORED);
  append(w);
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
  if (!have(0)) return context.inputs_found();
  while (run_instance(context, args) && have(own_round() + 1)) {
    set_own_round(own_round() + 1);
    context.team.sync();  // what was staged may lie there until now
  }
  if (own_round()) set_own_round(0);
}

}  // namespace distmk
