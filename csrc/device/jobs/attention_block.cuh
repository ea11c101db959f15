// A block job of attention: O = softmax(scale Q K^T) V for a block of queries, FlashAttention-2 (Dao, arXiv:2307.08691)
// on tensor cores, by warpgroups or warps. A query is a (row, head) pair of a run and a KV head, so the heads of a GQA
// group share the K and V tiles.
//
// The eight warps are row groups of 16 queries times ways. A way takes KEYS positions of every KV tile, and the ways
// are combined at the end. Jobs with few queries have many ways. With heads of more than 128 elements, registers hold
// half an output, so the eight warps are row groups times halves.
#pragma once
#include "device/core/marks.cuh"
#include "device/jobs/attention_warp.cuh"

namespace distmk {
namespace jobs {

// Combines the ways. All ways but the first leave (m, l, O) in shared memory behind the KV buffers, and the first adds
// them to its own in order.
template <uint32_t DIM, uint32_t KEYS>
struct WayCombine {
  using Warp = WarpAttention<DIM, KEYS>;
  static constexpr uint32_t VECTORS = DIM / 8 + 1;  // float4 per lane: the accumulator, maxima and sums
  static constexpr uint32_t BYTES = (NUM_WARPS - Warp::ROW_GROUPS) * VECTORS * 32 * sizeof(float4);

  DISTMK_FN static float4* at(uint32_t way) {
    // GPUs without bulk copies have fewer stages, and no job iterations.
    static_assert(!BULK_COPIES || KvBuffers<DIM>::BYTES + BYTES <= overlay_bytes(Overlay::KV_BUFFERS), "");
    return reinterpret_cast<float4*>(shared().at<Overlay::KV_BUFFERS>() + KvBuffers<DIM>::BYTES) +
           ((way - 1) * Warp::ROW_GROUPS + Warp::row_group()) * VECTORS * 32 + Warp::lane();
  }
  DISTMK_FN static void leave(const Warp& warp) {
    float4* to = at(Warp::way());
#pragma unroll
    for (uint32_t i = 0; i < DIM / 8; ++i)
      to[32 * i] = {warp.acc[i][0], warp.acc[i][1], warp.acc[i][2], warp.acc[i][3]};
    to[32 * (VECTORS - 1)] = {warp.softmax[0].max, warp.softmax[0].sum, warp.softmax[1].max, warp.softmax[1].sum};
  }
  DISTMK_FN static void add(Warp& warp, uint32_t way) {
    const float4* from = at(way);
    const float4 scalars = from[32 * (VECTORS - 1)];
    const float factor[2] = {warp.softmax[0].raise(scalars.x), warp.softmax[1].raise(scalars.z)};
    const float weight[2] = {warp.softmax[0].weight(scalars.x), warp.softmax[1].weight(scalars.z)};
    warp.softmax[0].sum += weight[0] * scalars.y;
    warp.softmax[1].sum += weight[1] * scalars.w;
#pragma unroll
    for (uint32_t i = 0; i < DIM / 8; ++i) {
      const float4 o = from[32 * i];
      warp.acc[i][0] = warp.acc[i][0] * factor[0] + o.x * weight[0];
      warp.acc[i][1] = warp.acc[i][1] * factor[0] + o.y * weight[0];
      warp.acc[i][2] = warp.acc[i][2] * factor[1] + o.z * weight[1];
      warp.acc[i][3] = warp.acc[i][3] * factor[1] + o.w * weight[1];
    }
  }
};

// Stores the outputs of a lane's two queries.
template <class Warp>
DISTMK_FN void store_attention(const AttentionJob& job, uint32_t query, uint32_t num_queries, const Warp& warp) {
  const AttentionJobsArgs& args = attention_plan().args;
  auto* out = at_operand<__nv_bfloat16>(args.out);
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i, query += 8) {
    if (query >= num_queries) continue;
    const float scale = normalizer(warp.softmax[i].sum);
    const QueryPlace place(job, query);
#pragma unroll
    for (uint32_t j = 0; j < Warp::COLS / 8; ++j) {
      if (Warp::first_col() + 8 * j >= args.head_dim) continue;
      *reinterpret_cast<uint32_t*>(out + place.output(args, Warp::first_col() + 8 * j + Warp::lane() % 4 * 2)) =
          pack_bf16(warp.acc[j][2 * i] * scale, warp.acc[j][2 * i + 1] * scale);
    }
  }
}

// Whether the two warpgroups of a job take turns (ping-pong, see attend()), and which of them a thread belongs to.
template <uint32_t DIM, uint32_t KEYS>
struct WarpgroupPingPong {
  static constexpr bool ENABLED = WarpAttention<DIM, KEYS>::BY_WARPGROUPS && !KvBuffers<DIM>::LAG;

  DISTMK_FN static bool is_first() { return ENABLED && threadIdx.x < NUM_CONSUMERS / 2; }
  DISTMK_FN static bool is_second() { return ENABLED && threadIdx.x >= NUM_CONSUMERS / 2; }
};

// The copies of a job's KV tiles, which run some tiles ahead. If warpgroups take turns, the first one copies one tile
// fewer ahead: the second is not yet done with the last tile, whose buffer would be filled.
template <uint32_t DIM, uint32_t KEYS>
class TileCopies {
  using Warp = WarpAttention<DIM, KEYS>;

 public:
  DISTMK_FN explicit TileCopies(uint32_t num_keys) : loader_(num_keys) {
    loader_.pages.look_up();
    barrier_sync<NUM_CONSUMERS>();
#pragma unroll 1
    for (uint32_t i = 0; i < ahead(); ++i) loader_.copy(i);
  }
  // Called while the products of `tile` run.
  DISTMK_FN void copy_ahead(uint32_t tile) {
    loader_.pages.look_up_ahead(tile + ahead());
    loader_.copy(tile + ahead());
  }
  // await_first() waits for this thread's copies for tile 0. await_next() waits for its copies for tile + 1, if
  // copy_ahead(tile) is called next. Other threads' copies have landed after the next barrier.
  DISTMK_FN static void await_first() { await_all_but<AHEAD - 1>(); }
  DISTMK_FN static void await_next() { await_all_but<AHEAD - 2>(); }

 private:
  static constexpr uint32_t AHEAD = KvBuffers<DIM>::AHEAD;
  KvLoader<DIM> loader_;

  DISTMK_FN static uint32_t ahead() { return AHEAD - WarpgroupPingPong<DIM, KEYS>::is_first(); }
  template <uint32_t PENDING>
  DISTMK_FN static void await_all_but() {
    if (WarpgroupPingPong<DIM, KEYS>::is_first())
      await_copies<PENDING - WarpgroupPingPong<DIM, KEYS>::ENABLED>();
    else
      await_copies<PENDING>();
    if constexpr (Warp::BY_WARPGROUPS) fence_copies_to_shared();  // warpgroup products read through the async proxy
  }
};

// The positions that queries see. of_lane: where they end for this lane's two queries. fewest: the first such end among
// the warp's queries. most: the last one among the queries that multiply together. Positions before seen_by_all are
// hidden by the window from some query of the warp.
struct Visibility {
  uint32_t of_lane[2], fewest, most, seen_by_all;
};

// The main loop of a warp over `num_tiles` tiles. While a tile's values are multiplied, the next tile's keys are
// multiplied and its softmax is computed.
//
// Two warpgroups take turns. One of them starts its products, which holds it until the tensor cores have taken them,
// and copies. Meanwhile the other computes a softmax. The second warpgroup is half a tile behind.
template <uint32_t DIM, uint32_t KEYS>
DISTMK_FN void attend(WarpAttention<DIM, KEYS>& warp, TileCopies<DIM, KEYS>& copies, const Visibility& visible,
                      uint32_t num_tiles, float scale) {
  using Warp = WarpAttention<DIM, KEYS>;
  using PingPong = WarpgroupPingPong<DIM, KEYS>;
  const uint32_t begin = Warp::way() * KEYS;
  const uint32_t num_steps = begin < visible.most ? (visible.most - begin + KV_ROWS - 1) / KV_ROWS : 0;
  const bool varies = !are_only_scaled(attention_plan().args.scores);
  const auto weigh = [&](uint32_t tile, float (&s)[Warp::SCORES], float (&factor)[2]) {
    const uint32_t first = tile * KV_ROWS + begin;
    if (varies) Warp::vary(s, scale, attention_plan().args.scores);
    if (first + KEYS > visible.fewest) Warp::mask_from(first, visible.of_lane, s);
    if (first < visible.seen_by_all) Warp::mask_before(first, visible.of_lane, attention_plan().args.window, s);
    warp.weigh(s, varies ? 1.0f : scale, factor);
  };
  copies.await_first();
  barrier_sync<NUM_CONSUMERS>();
  mark(Mark::FIRST);
  if (num_steps) {
    float s[Warp::SCORES], factor[2];
    warp.begin_scores(0, s);
    warp.template end_scores<0>(s);
    weigh(0, s, factor);
    warp.keep_weights(s);
  }
  // The first warpgroup's turn begins. Afterwards the next tile's keys are there.
  const auto begin_mma = [&] {
    if (!PingPong::is_second()) copies.await_next();
    barrier_sync<NUM_CONSUMERS>();
  };
  const auto end_mma = [&] {
    if (PingPong::is_second()) copies.await_next();
    if (PingPong::ENABLED) barrier_sync<NUM_CONSUMERS>();
  };
  if (PingPong::is_second()) end_mma();  // so that it is half a tile behind
#pragma unroll 1
  for (uint32_t tile = 0; tile < num_tiles; ++tile) {
    begin_mma();
    float s[Warp::SCORES], factor[2];
    if (tile + 1 < num_steps) {
      warp.begin_scores_and_values(tile + 1, tile, s);
      copies.copy_ahead(tile);
      end_mma();
      warp.template end_scores<1>(s);
      weigh(tile + 1, s, factor);
      warp.end_values(s);
      warp.rescale(factor);
      warp.keep_weights(s);
      continue;
    }
    copies.copy_ahead(tile);
    if (tile < num_steps) {
      float none[1] = {};
      warp.begin_values(tile);
      warp.end_values(none);
    }
    end_mma();
  }
  if (PingPong::is_first()) begin_mma();  // the second warpgroup's last turn
}

// Runs the plan's current block job. All consumers call it.
template <uint32_t DIM, uint32_t KEYS>
DISTMK_NOINLINE void run_attention_job() {
  const AttentionJobsArgs& args = attention_plan().args;
  const AttentionJob& job = attention_plan().job;
  using Warp = WarpAttention<DIM, KEYS>;
  const uint32_t num_heads = job.num_heads, num_queries = static_cast<uint32_t>(job.run.num_rows) * num_heads;
  const auto end_of = [&](uint32_t query) { return end_of_query(job.run, num_heads, query) - job.first_position; };
  const uint32_t num_keys = end_of(job.first_query + Warp::JOB_QUERIES - 1);
  TileCopies<DIM, KEYS> copies(num_keys);

  const uint32_t first_query = job.first_query + Warp::row_group() * QUERIES_PER_WARP;
  const uint32_t first_of_group = first_query / Warp::GROUP_QUERIES * Warp::GROUP_QUERIES;
  const uint32_t query = first_query + Warp::lane() / 4;
  const uint32_t most = first_of_group < num_queries ? end_of(first_of_group + Warp::GROUP_QUERIES - 1) : 0;
  const uint32_t last_end = end_of(first_query + QUERIES_PER_WARP - 1);
  const Visibility visible{
      {end_of(query), end_of(query + 8)}, end_of(first_query), most, last_end - min(last_end, args.window)};
  Warp warp;
  warp.begin(args.head_dim,
             [&](uint32_t i) { return QueryPlace(job, min(query + 8 * i, num_queries - 1)).input(args); });
  attend(warp, copies, visible, (num_keys + KV_ROWS - 1) / KV_ROWS, args.scores.scale * LOG2_E);
  mark(Mark::LAST);
  warp.reduce_sums();
  if constexpr (Warp::WAYS > 1) {
    if (Warp::way()) WayCombine<DIM, KEYS>::leave(warp);
    barrier_sync<NUM_CONSUMERS>();
    if (!Warp::way())
#pragma unroll 1
      for (uint32_t way = 1; way < Warp::WAYS; ++way) WayCombine<DIM, KEYS>::add(warp, way);
  }
  if (Warp::way() == 0) store_attention(job, query, num_queries, warp);
  mark(Mark::STORED);
}

}  // namespace jobs
}  // namespace distmk
