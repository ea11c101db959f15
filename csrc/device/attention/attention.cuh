// The attention task for up to 16 rows: split-KV attention over the paged cache on tensor cores, O = softmax(scale Q
// K^T) V for a GQA group. An instance is one run of rows x one KV head x one split of the positions (params.cuh). Its
// eight warps take KV tiles of 16 positions in turn, and combine their partials in a fixed order. Afterwards the
// combine task (combine.cuh) combines the splits, or the GEMV that consumes them does (linear/fused_combine.cuh). This
// file chooses an instance's path and has the path for any number of rows; decode_row.cuh has the paths of a decode
// row.
#pragma once
#include "device/attention/decode_row.cuh"
#include "device/attention/work_assignment.cuh"

namespace distmk {
namespace attention {

// Runs a block of queries against this warp's KV tiles. `tile` receives the first tile, whose loads have been issued.
// If registers do not hold a whole tile (P::HOLDS_TILE), it receives the keys, which the values later replace. `rows`:
// cache rows of the first tile.
template <class P>
DISTMK_FN void attend(const P& p, uint32_t first_query, uint32_t rows, KvTileOf<P::MAX_DIM>& tile,
                      WarpPartialOf<P::MAX_DIM>& partial) {
  const uint32_t last = p.first_new() + p.row_of(first_query + mma_group());  // causal mask: the query's own position
  const uint32_t visible_begin = max(p.begin, first_seen(p.args.window, last)), visible_end = min(p.end, last + 1);
  uint32_t next_rows = look_up_kv_rows(p, p.first_step() + NUM_WARPS);
#pragma unroll 1
  for (uint32_t step = p.first_step(); step < p.num_tiles(); step += NUM_WARPS) {
    const uint32_t tile_index = p.tile_at(step);
    const bool cached = is_cached(p, tile_index), more = step + NUM_WARPS < p.num_tiles();
    const PagedTile<P> present{p, rows}, next{p, next_rows};
    rows = next_rows;
    next_rows = look_up_kv_rows(p, step + 2 * NUM_WARPS);
    if (!cached) patch_new_k(p, tile_index, tile);
    float scores[2][4] = {};
    multiply_qk(p, [&](uint32_t i, uint32_t j) { return tile.k[i][j]; }, scores);
    if (!P::HOLDS_TILE)
      load_v(p, present, tile);
    else if (more)
      load_k(p, next, tile);
    if (!P::ON_HOT_PATH && !are_only_scaled(p.args.scores)) vary_scores(scores, p.args.scores);
    uint32_t weights[1][2][2];
    partial.template softmax_step<false>(tile_index, visible_begin, visible_end, false, scores, weights);
    if (!cached) patch_new_v(p, tile_index, tile);
    partial.multiply_pv(tile, p.head_dim(), weights[0]);
    if (!more) continue;
    if (P::HOLDS_TILE)
      load_v(p, next, tile);
    else
      load_k(p, next, tile);
  }
}

// Runs an instance with any number of rows and any head_dim up to P::DIM. False: the launch was over before its inputs
// were there.
template <class P>
DISTMK_FN bool run_any_rows(Context& context, const AttentionArgs& args) {
  const auto is_assigned = [] { return P::ON_HOT_PATH && kv_path(own_round()); };
  const AttentionSplit split =
      is_assigned() ? shared().attention_assignment.split : split_of(context, args, instance_of(context, own_round()));
  const P p{split, context, args};
  const Team& team = context.team;
  const uint32_t num_queries = p.num_queries(), warp = own_thread() / 32;
  const bool has_tile = p.first_step() < p.num_tiles();
#pragma unroll 1
  for (uint32_t block = 0; block < num_queries; block += Q_TILE) {
    const uint32_t count = min(Q_TILE, num_queries - block);
    KvTileOf<P::MAX_DIM> tile;
    uint32_t rows = 0;
    if (has_tile) {
      const PagedTile<P> first{p,
                               is_assigned() ? assigned_kv_rows(p.first_step()) : look_up_kv_rows(p, p.first_step())};
      load_k(p, first, tile);
      if (P::HOLDS_TILE) load_v(p, first, tile);
      rows = first.rows;
    } else {
      tile.clear();
    }
    mark(Mark::PREPARED);
    // Before this point only older positions are read. New ones are read by the one instance that appends them.
    if (args.polls_qkv)
      context.begin_polling();
    else if (!context.inputs_ready())
      return false;
    if (block == 0) reset_fused_partials(p);
    load_q(p, block, count, args.polls_qkv);
    if (block == 0) load_new_kv(p, count, args.polls_qkv);
    context.inputs_polled();
    mark(Mark::INPUTS);
    team.sync();
    WarpPartialOf<P::MAX_DIM> partial;
    attend(p, block, rows, tile, partial);
    mark(Mark::LAST);
    team.sync();
    mark(Mark::MET);
    partial.reduce_sum();
    const auto combine_from = [&](uint32_t first) {
      const uint32_t end = min(first + P::QUERIES_PER_COMBINE, count), index = warp / P::PARTS, part = warp % P::PARTS;
      partial.store(p.warp_partial(opaque(p.first_step()), 0), first, end);
      void* out = first + index < end ? partial_at(p, block + first + index, part) : nullptr;
      team.sync();
      if (out) combine_warps(p, index, part, out);
      team.sync();
    };
    if constexpr (P::HOLDS_TILE) {
#pragma unroll
      for (uint32_t first = 0; first < Q_TILE; first += P::QUERIES_PER_COMBINE) {
        if (first >= count) break;
        combine_from(first);
      }
    } else {
#pragma unroll 1
      for (uint32_t first = 0; first < count; first += P::QUERIES_PER_COMBINE) combine_from(first);
    }
  }
  mark(Mark::STORED);
  // A single row's cache row is in the assignment, because a look-up in the page table would delay the worker's next
  // task.
  const auto kv_row = [&](uint32_t position) {
    return p.run.num_rows == 1 && is_assigned() ? shared().attention_assignment.new_line : p.kv_row(position);
  };
  append_new_kv(p, kv_row);
  return true;
}

}  // namespace attention

namespace attention {

// Runs this worker's instances of a spread task, or the one instance of a massive launch. `run` runs instance
// own_round(); `count` returns the number of all instances. The facts that decide the path are read again for every
// instance: in registers, they would be spilled.
template <class Count, class Run>
DISTMK_FN void run_instances(Context& context, const Count& count, const Run& run) {
  const auto has_instance = [&](uint32_t round) {
    if (!is_spread(*context.task.desc)) return round == 0;
    return instance_of(context, round) < count();
  };
  if (!has_instance(0)) return context.inputs_polled();
  while (run() && has_instance(own_round() + 1)) {
    set_own_round(own_round() + 1);
    context.team.sync();  // all warps have left the last instance's shared memory
  }
  if (own_round()) set_own_round(0);
}

}  // namespace attention

DISTMK_FN void body_attention(Context& context, const AttentionArgs& args) {
  using namespace attention;
  const auto run = [&] {
    switch (kv_path(own_round())) {
      case ONE_TILE_PER_WARP:
        return run_decode_row<Batch1RowParams<HOT_HEAD_DIM>>(context, args);
      case PIPELINED:
        return args.head_dim == HOT_HEAD_DIM ? run_decode_row<DecodeRowParams<HOT_HEAD_DIM>>(context, args)
                                             : run_decode_row<DecodeRowParams<HOT_HEAD_DIM / 2>>(context, args);
      default:
        return run_any_rows<Params>(context, args);
    }
  };
  run_instances(context, [&] { return count_instances(context, args); }, run);
}

DISTMK_FN void body_general_attention(Context& context, const AttentionArgs& args) {
  using namespace attention;
  const auto run = [&] {
    return args.head_dim <= HOT_HEAD_DIM ? run_any_rows<OffHotPathParams<HOT_HEAD_DIM>>(context, args)
                                         : run_any_rows<OffHotPathParams<MAX_HEAD_DIM>>(context, args);
  };
  run_instances(context, [&] { return num_attention_instances(args, *context.batch(args.batch)); }, run);
}

DISTMK_FN uint32_t num_work_items(const Context& context, const AttentionArgs& args) {
  return num_attention_instances(args, *context.batch(args.batch));
}

}  // namespace distmk
