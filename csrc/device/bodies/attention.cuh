// Split-KV attention over the paged cache, on tensor cores. A query and a softmax weight are each two bf16, high and
// low half, so nothing is lost to rounding but the cache's own. A warp takes CHUNK positions at a time; what the warps
// have found is merged in shared memory, in a fixed order.
#pragma once
#include "device/attention_tile.cuh"

namespace distmk {
namespace attention {

// One block of queries over this warp's chunks, of which the first is on its way, and `next_lines` of the second.
DISTMK_FN void attend(const Work& w, uint32_t first_query, uint32_t next_lines, Tile& tile, Partial& partial) {
  const uint32_t num_chunks = w.num_chunks();
  const uint32_t last = w.first_new() + (first_query + group_of_lane()) / w.num_heads;  // position this query may see
#pragma unroll 1
  for (uint32_t turn = w.chunk_turn(); turn < num_chunks; turn += NUM_WARPS) {
    const uint32_t chunk = w.first_chunk() + turn;
    const bool whole = is_cached(w, chunk), more = turn + NUM_WARPS < num_chunks;
    const uint32_t lines = next_lines;
    next_lines = look_up(w, chunk + 2 * NUM_WARPS);
    if (!whole) patch_keys(w, chunk, tile);
    float scores[2][4] = {};
    multiply_keys(w, tile, scores);
    if (more) load_keys(w, lines, tile);
    uint32_t weights[2][2];
    partial.weigh(chunk, w.begin, min(w.end, last + 1), scores, weights);
    if (!whole) patch_values(w, chunk, tile);
    partial.add_values(tile, w.args.head_dim, weights);
    if (more) load_values(w, lines, tile);
  }
}

// Merges the warps' results for a query and writes them out; a warp a query, four elements a lane.
DISTMK_FN void write_query(const Work& w, uint32_t query, uint32_t index) {
  const uint32_t lane = threadIdx.x % 32, active = min(NUM_WARPS, w.num_chunks()), dim = w.args.head_dim;
  float2 mine = {-INFINITY, 0};  // maximum and sum of one warp
  if (lane < active) mine = *reinterpret_cast<const float2*>(w.merged(lane, index) + MAX_HEAD_DIM);
  float maximum = mine.x;
  for (uint32_t step = NUM_WARPS / 2; step; step >>= 1) maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, step));
  const float weight = mine.x > -INFINITY ? __expf(mine.x - maximum) : 0.0f;
  float sum = mine.y * weight;
  for (uint32_t step = NUM_WARPS / 2; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
  float4 acc = {0, 0, 0, 0};
  for (uint32_t turn = 0; turn < active; ++turn) {
    const float4 more = *reinterpret_cast<const float4*>(w.merged(turn, index) + 4 * lane);
    const float share = __shfl_sync(~0u, weight, turn);
    acc.x += more.x * share, acc.y += more.y * share, acc.z += more.z * share, acc.w += more.w * share;
  }
  const uint64_t row =
      (uint64_t{w.first_head} + query % w.num_heads) * MAX_ROWS + w.run.row_begin + query / w.num_heads;
  float* out = w.context.at<float>(w.args.part) + (row * w.args.max_splits + w.instance.split) * (2 + dim);
  if (lane == 0) *reinterpret_cast<float2*>(out) = {maximum, sum};
  if (4 * lane >= dim) return;
  out += 2 + 4 * lane;
  *reinterpret_cast<float2*>(out) = {acc.x, acc.y};
  *reinterpret_cast<float2*>(out + 2) = {acc.z, acc.w};
}

DISTMK_FN Work work_of(Context& context, const AttentionArgs& args, const Batch& batch, uint32_t index) {
  const AttentionInstance instance = attention_instance(args, batch, index);
  Work w{context, args, instance, batch.runs[instance.run]};
  const uint32_t model_kv = args.kv_begin + instance.kv_head;
  const uint32_t first = max(model_kv * args.group, args.q_begin),
                 last = min((model_kv + 1) * args.group, args.q_begin + args.num_q);
  w.first_head = first - args.q_begin;
  w.num_heads = last - first;
  const auto kv_len = static_cast<uint32_t>(w.run.kv_len);
  w.begin = split_begin(kv_len, instance.split, instance.num_splits);
  w.end = split_begin(kv_len, instance.split + 1, instance.num_splits);
  w.page_shift = 31 - __clz(static_cast<int>(args.page_size));
  w.pages = context.at<int32_t>(args.page_table) + uint64_t(w.run.slot) * args.max_pages;
  return w;
}

// False: the launch was over before its inputs were there.
DISTMK_FN bool run_instance(Context& context, const AttentionArgs& args, const Batch& batch, uint32_t index) {
  const Work w = work_of(context, args, batch, index);
  const Team& team = context.team;
  const uint32_t num_queries = w.num_heads * static_cast<uint32_t>(w.run.num_rows), warp = threadIdx.x / 32;
  const bool has_chunk = w.chunk_turn() < w.num_chunks();
#pragma unroll 1
  for (uint32_t block = 0; block < num_queries; block += QUERIES) {
    const uint32_t count = min(QUERIES, num_queries - block);
    Tile tile;
    uint32_t next_lines = 0;
    if (has_chunk) {
      const uint32_t chunk = w.first_chunk() + w.chunk_turn(), lines = look_up(w, chunk);
      next_lines = look_up(w, chunk + NUM_WARPS);
      load_keys(w, lines, tile);
      load_values(w, lines, tile);
    } else {
      tile.clear();  // or the compiler would keep its registers for whatever they hold, in all other tasks too
    }
    if (!context.inputs_ready()) return false;  // old positions were there before
    stage_queries(w, block, count);
    // What is appended is read by all warps of this instance, and by no other this iteration.
    if (block == 0) append(w, count);
    team.sync();
    Partial partial;
    attend(w, block, next_lines, tile, partial);
    team.sync();
    partial.add_up();
#pragma unroll
    for (uint32_t first = 0; first < QUERIES; first += MERGED_QUERIES) {
      if (first >= count) break;
      const uint32_t end = min(first + MERGED_QUERIES, count);
      if (has_chunk) partial.write(w.merged(w.chunk_turn(), 0), first, end);
      team.sync();
      if (first + warp < end) write_query(w, block + first + warp, warp);
      team.sync();
    }
  }
  return true;
}

}  // namespace attention

DISTMK_FN void body_attention(Context& context, const AttentionArgs& args) {
  const Batch& batch = *context.batch(args.batch);
  uint32_t instance = context.instance;
  while (attention::run_instance(context, args, batch, instance) && context.next_of_share(instance)) {
  }
}

}  // namespace distmk
