// Split-KV attention for one decode row with heads of DIM elements: Q [up to 8 heads, DIM] against K, V [positions of
// the split, DIM]. A token's latency is mostly dependent instructions, so this path has none that it does not need. K
// and V arrive in one of two ways (KvPath). ONE_TILE_PER_WARP: straight from the cache, for the only row of a batch
// with a fused combine. PIPELINED: through the pipeline that also streams weights (work_assignment.cuh has the
// producer), if the split has a tile for every warp. All other rows take run_any_rows() (attention.cuh).
#pragma once
#include "device/attention/online_softmax.cuh"
#include "device/attention/qk_norm_rope.cuh"
#include "device/core/marks.cuh"

namespace distmk {
namespace attention {

// Batch 1, straight from the cache. There is no loop, because no warp has a second tile.

template <uint32_t DIM>
DISTMK_FN void load_first_tile(const Batch1RowParams<DIM>& p, KvTile& tile) {
  const uint32_t step = p.first_step();
  if (step >= p.num_tiles()) return tile.clear();
  const uint64_t begin = uint64_t{shared().attention_assignment.lines[step]} * DIM;
  ContiguousK<Batch1RowParams<DIM>, FromCache>(p, p.k_cache() + begin).load(tile);
  ContiguousV<Batch1RowParams<DIM>, FromCache>(p, p.v_cache() + begin).load(tile);
}
template <uint32_t DIM>
DISTMK_FN void attend(const Batch1RowParams<DIM>& p, KvTile& tile, WarpPartial& partial) {
  const uint32_t step = p.first_step(), tile_index = p.tile_at(step);
  if (step >= p.num_tiles()) return;
  if (step == 0) patch_new_k(p, tile_index, tile);
  float scores[2][4] = {};
  multiply_qk(p, [&](uint32_t i, uint32_t j) { return tile.k[i][j]; }, scores);
  uint32_t weights[1][2][2];
  partial.template softmax_step<true>(tile_index, p.begin, p.end, false, scores, weights);
  if (step == 0) patch_new_v(p, tile_index, tile);
  partial.multiply_pv(tile, DIM, weights[0]);
}

// Through the pipeline: a stage holds K, V of one step's tile, then K, V of the next step's. A warp copies its first
// tile to registers, so that the producer has room before Q exists. Behind that tile, every second one is read from its
// stage while another is in registers, so that the products of one hide the latency of the other's.

// A warp's read position in the pipeline.
template <class P>
struct KvPipelineReader {
  using K = ContiguousK<P, FromStage>;
  using V = ContiguousV<P, FromStage>;
  const P& p;
  PipelineState<NUM_STAGES> stage;
  uint32_t step;

  DISTMK_FN explicit KvPipelineReader(const P& params)
      : p(params), stage(consumer_state().stage.advanced(params.first_step() / 2)), step(params.first_step()) {}

  // Waits until the tile has landed, and returns its K rows. Its V rows lie behind them.
  DISTMK_FN const __nv_bfloat16* consumer_wait() const {
    barrier_wait(&shared().pipeline.full[stage.index], stage.phase);
    const char* slot = shared().at<Overlay::PIPELINE_STAGES>() + stage.index * STAGE_BYTES;
    return reinterpret_cast<const __nv_bfloat16*>(slot + step % 2 * 2 * p.kv_tile_bytes());
  }
  DISTMK_FN K k(const __nv_bfloat16* rows) const { return {p, rows}; }
  DISTMK_FN V v(const __nv_bfloat16* rows) const { return {p, rows + KV_TILE * P::DIM}; }
  DISTMK_FN void load(KvTile& tile) const {
    const __nv_bfloat16* rows = consumer_wait();
    k(rows).load(tile);
    v(rows).load(tile);
  }
  // The last stage may hold only one tile. Its reader then arrives for both.
  DISTMK_FN void consumer_release() const {
    warp_arrive(&shared().pipeline.empty[stage.index],
                (step % 2 == 0 && step + 1 == p.num_tiles() ? 2 : 1) * ARRIVALS_PER_TILE);
  }
  DISTMK_FN bool has_next() const { return step + NUM_WARPS < p.num_tiles(); }
  // Whether the next tile exists and is whole, so that nothing in it is masked. A window may begin inside a tile.
  DISTMK_FN bool has_whole_next() const { return step + NUM_WARPS < p.num_whole_tiles(); }
  DISTMK_FN void advance() {
    stage = stage.advanced(NUM_WARPS / 2);
    step += NUM_WARPS;
  }
};

// Moves this warp's pipeline state behind all stages of the split.
template <class P>
DISTMK_FN void advance_past_split(const P& p) {
  constexpr uint32_t MOST = PipelineState<NUM_STAGES>::MOST_STEPS;
  ConsumerState consumer = consumer_state();
  for (uint32_t left = (p.num_tiles() + 1) / 2; left; left -= min(left, MOST))
    consumer.stage = consumer.stage.advanced(min(left, MOST));
  store_consumer_state(consumer);
}

template <uint32_t DIM>
DISTMK_FN void load_first_tile(const DecodeRowParams<DIM>& p, KvTile& tile) {
  KvPipelineReader<DecodeRowParams<DIM>>(p).load(tile);
}
// `tile` holds the warp's first tile. Only the tile of step 0 may have new positions, or positions behind the split.
// Positions before the split's first one are masked.
template <uint32_t DIM>
DISTMK_FN void attend(const DecodeRowParams<DIM>& p, KvTile& tile, WarpPartial& partial) {
  KvPipelineReader<DecodeRowParams<DIM>> reader(p);
  reader.consumer_release();
#pragma unroll 1
  while (true) {
    const uint32_t tile_index = p.tile_at(reader.step);
    const bool is_cached = reader.step != 0, two = reader.has_whole_next();
    if (!is_cached) patch_new_k(p, tile_index, tile);
    const __nv_bfloat16* second = p.new_k(0);  // without a second tile: any readable rows, whose scores are masked
    if (two) {
      reader.advance();
      second = reader.consumer_wait();
    }
    const auto second_k = reader.k(second);
    float scores[4][4] = {};
    multiply_qk(p, [&](uint32_t i, uint32_t j) { return i < 2 ? tile.k[i][j] : second_k.load(i % 2, j); }, scores);
    uint32_t weights[2][2][2];
    partial.template softmax_step<false>(tile_index, p.begin, p.end, two, scores, weights);
    if (!is_cached) patch_new_v(p, tile_index, tile);
    partial.multiply_pv(tile, DIM, weights[0]);
    if (two) {
      reader.v(second).load(tile);
      partial.multiply_pv(tile, DIM, weights[1]);
      reader.consumer_release();
    }
    if (!reader.has_next()) break;
    reader.advance();
    reader.load(tile);
    reader.consumer_release();
  }
  advance_past_split(p);
}

// Runs the instance with parameters of type P. False: the launch was over before its inputs were there.
template <class P>
DISTMK_FN bool run_decode_row(Context& context, const AttentionArgs& args) {
  const AttentionAssignment& assignment = shared().attention_assignment;
  const P p{assignment.split, context, args};
  const uint32_t warp = own_thread() / 32;
  KvTile tile;
  load_first_tile(p, tile);
  mark(Mark::PREPARED);
  if (args.polls_qkv)
    context.begin_polling();
  else if (!context.inputs_ready())
    return false;
  load_q(p, 0, p.num_heads, args.polls_qkv);
  load_new_kv(p, p.num_heads, args.polls_qkv);
  context.inputs_polled();
  mark(Mark::INPUTS);
  context.team.sync();
  WarpPartial partial;
  attend(p, tile, partial);
  mark(Mark::LAST);
  partial.reduce_sum();
#pragma unroll
  for (uint32_t first = 0; first < Q_TILE; first += P::QUERIES_PER_COMBINE) {
    if (first >= p.num_heads) break;
    if (first) context.team.sync();
    const uint32_t end = min(first + P::QUERIES_PER_COMBINE, p.num_heads);
    partial.store(p.warp_partial(opaque(p.first_step()), 0), first, end);
    void* out = first + warp < end ? partial_at(p, first + warp, 0) : nullptr;
    context.team.sync();
    if (first == 0) mark(Mark::MET);
    if (out) combine_warps(p, warp, 0, out);
  }
  mark(Mark::STORED);
  reset_fused_partials(p);
  append_new_kv(p, [&](uint32_t) { return assignment.new_line; });
  return true;
}

}  // namespace attention
}  // namespace distmk
