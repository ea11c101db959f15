// One job of wide attention: O = softmax(Q K^T / sqrt(d)) V of a block of queries, FlashAttention-2 (Dao,
// arXiv:2307.08691) on tensor cores, by warpgroups or warps. A query is a (row, head) pair of a run and a KV head: the
// heads of a GQA group share the K and V tiles. The eight warps are row groups of 16 queries times ways: a way takes
// KEYS positions of every KV tile, and the ways are combined at the end. Many ways are for jobs with few queries.
#pragma once
#include "device/attention/lse.cuh"
#include "device/wide/kv_tiles.cuh"
#include "platform/wgmma.cuh"

namespace distmk {
namespace wide {

constexpr uint32_t QUERIES_PER_WARP = 16;

// A warp's 16 queries over its ways of the tiles. Lane 4 g + t has queries g and g + 8, and of each t's columns of
// every eight (see `multiply`).
template <uint32_t DIM, uint32_t KEYS>
struct WarpAttention {
  static constexpr uint32_t WAYS = KV_ROWS / KEYS, ROW_GROUPS = NUM_WARPS / WAYS,
                            JOB_QUERIES = ROW_GROUPS * QUERIES_PER_WARP;
  // The four warps of a warpgroup have the same way, so that they multiply together.
  static constexpr bool BY_WARPGROUPS = ROW_GROUPS >= 4;
  static constexpr uint32_t GROUP_QUERIES = (BY_WARPGROUPS ? 4 : 1) * QUERIES_PER_WARP;
  using Buffers = KvBuffers<DIM>;

  uint32_t q[DIM / 16][4];
  float acc[DIM / 8][4];
  LogSumExp<Base2> softmax[2];  // the sum is of this lane's positions until reduce_sums()

  // Opaque where an address follows from it: the compiler would keep one for each step of a loop.
  DISTMK_FN static uint32_t lane() { return threadIdx.x % 32; }
  DISTMK_FN static uint32_t row_group() { return threadIdx.x / 32 % ROW_GROUPS; }
  DISTMK_FN static uint32_t way() { return threadIdx.x / 32 / ROW_GROUPS; }

  // `query` gives the pointer to one of the lane's two queries.
  template <class Query>
  DISTMK_FN void begin(uint32_t head_dim, const Query& query) {
#pragma unroll
    for (uint32_t i = 0; i < DIM / 8; ++i) acc[i][0] = acc[i][1] = acc[i][2] = acc[i][3] = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      softmax[i] = {};
      const auto* from = reinterpret_cast<const uint32_t*>(query(i)) + lane() % 4;
#pragma unroll
      for (uint32_t j = 0; j < DIM / 8; ++j) q[j / 2][i + j % 2 * 2] = 8 * j < head_dim ? __ldcg(from + 4 * j) : 0;
    }
  }

  // The lane's queries see the positions before visible[i]; `all_visible`: all of the tile. `scale`: log2(e) / sqrt(d).
  DISTMK_FN void step(uint32_t tile, const uint32_t (&visible)[2], bool all_visible, float scale) {
    float s[KEYS / 8][4];
#pragma unroll
    for (uint32_t i = 0; i < KEYS / 8; ++i) s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0.0f;
    multiply_qk(Buffers::k(tile) + way() * KEYS * Buffers::ROW_BYTES, s);
    if (!all_visible) {
      const uint32_t first = tile * KV_ROWS + way() * KEYS + lane() % 4 * 2;
#pragma unroll
      for (uint32_t i = 0; i < KEYS / 8; ++i)
#pragma unroll
        for (uint32_t e = 0; e < 4; ++e)
          if (first + 8 * i + e % 2 >= visible[e / 2]) s[i][e] = -INFINITY;
    }
    weigh(s, scale);
    multiply_pv(Buffers::v(tile) + way() * KEYS * Buffers::ROW_BYTES, s);
  }

  DISTMK_FN void reduce_sums() {
    for (LogSumExp<Base2>& each : softmax) each.sum = attention::lanes_sum<4>(each.sum);
  }

 private:
  // S += Q K^T.
  DISTMK_FN void multiply_qk(uint32_t tile, float (&s)[KEYS / 8][4]) {
    auto& sums = reinterpret_cast<float (&)[KEYS / 2]>(s);
    begin_products(sums, q);
#pragma unroll
    for (uint32_t k = 0; k < DIM / 16; ++k) {
      const uint32_t slot = tile + k / 4 * Buffers::SLOT_BYTES;
      if constexpr (BY_WARPGROUPS)
        tensor::multiply<KEYS>(sums, q[k], slot, k % 4);
      else
        tensor::multiply_by_mma<KEYS>(sums, q[k], slot, k % 4);
    }
    end_products(sums);
  }

  // Online softmax: scores become weights, and the accumulator is rescaled if a maximum has changed.
  DISTMK_FN void weigh(float (&s)[KEYS / 8][4], float scale) {
    float factor[2], minus_max[2];
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      float most = -INFINITY;
#pragma unroll
      for (uint32_t j = 0; j < KEYS / 8; ++j) most = fmaxf(most, fmaxf(s[j][2 * i], s[j][2 * i + 1]));
      factor[i] = softmax[i].raise(attention::lanes_max<4>(most) * scale);
      minus_max[i] = -finite_max(softmax[i].max);
    }
    if (!__all_sync(~0u, factor[0] == 1.0f && factor[1] == 1.0f)) {
#pragma unroll
      for (uint32_t i = 0; i < DIM / 8; ++i) {
        acc[i][0] *= factor[0];
        acc[i][1] *= factor[0];
        acc[i][2] *= factor[1];
        acc[i][3] *= factor[1];
      }
    }
#pragma unroll
    for (uint32_t j = 0; j < KEYS / 8; ++j)
#pragma unroll
      for (uint32_t e = 0; e < 4; ++e) {
        s[j][e] = Base2::exp(fmaf(s[j][e], scale, minus_max[e / 2]));
        softmax[e / 2].sum += s[j][e];
      }
  }

  // O += P V, the weights as A fragments.
  DISTMK_FN void multiply_pv(uint32_t tile, const float (&p)[KEYS / 8][4]) {
    uint32_t a[KEYS / 16][4];
#pragma unroll
    for (uint32_t k = 0; k < KEYS / 16; ++k)
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i)
        a[k][i] = pack_bf16(p[2 * k + i / 2][i % 2 * 2], p[2 * k + i / 2][i % 2 * 2 + 1]);
    auto& sums = reinterpret_cast<float (&)[DIM / 2]>(acc);
    begin_products(sums, a);
#pragma unroll
    for (uint32_t k = 0; k < KEYS / 16; ++k)
      if constexpr (BY_WARPGROUPS)
        tensor::multiply_rows<DIM>(sums, a[k], tile, k);
      else
        tensor::multiply_rows_by_mma<DIM>(sums, a[k], tile, k);
    end_products(sums);
  }

  template <uint32_t SUMS, uint32_t STEPS>
  DISTMK_FN static void begin_products(float (&sums)[SUMS], uint32_t (&a)[STEPS][4]) {
    if constexpr (BY_WARPGROUPS) {
      tensor::settle(sums);
      tensor::settle(a);
      tensor::begin<KEYS>();
    }
  }
  template <uint32_t SUMS>
  DISTMK_FN static void end_products(float (&sums)[SUMS]) {
    if constexpr (BY_WARPGROUPS) {
      tensor::commit<KEYS>();
      tensor::await<KEYS>();
      tensor::settle(sums);
    }
  }
};

// The combine of the ways: all but the first leave (m, l, O) in shared memory behind the KV buffers, and the first adds
// them to its own in order.
template <uint32_t DIM, uint32_t KEYS>
struct WayCombine {
  using Warp = WarpAttention<DIM, KEYS>;
  static constexpr uint32_t VECTORS = DIM / 8 + 1;  // float4 of a lane: the accumulator, maxima and sums
  static constexpr uint32_t BYTES = (NUM_WARPS - Warp::ROW_GROUPS) * VECTORS * 32 * sizeof(float4);

  DISTMK_FN static float4* at(uint32_t way) {
    // Without bulk copies there are fewer stages, and no wide iterations.
    static_assert(!BULK_COPIES || KvBuffers<DIM>::BYTES + BYTES <= sizeof(Shared::stages), "");
    return reinterpret_cast<float4*>(shared().stages + KvBuffers<DIM>::BYTES) +
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

// The outputs of a lane's two queries.
template <uint32_t DIM, class Warp>
DISTMK_FN void store_attention(const AttentionJob& job, uint32_t query, uint32_t num_queries, const Warp& warp) {
  const WideAttentionArgs& args = attention_plan().args;
  auto* out = at_operand<__nv_bfloat16>(args.out);
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i, query += 8) {
    if (query >= num_queries) continue;
    const float scale = normalizer(warp.softmax[i].sum);
    const uint32_t in_run = query / job.num_heads, head = job.first_head + query - in_run * job.num_heads,
                   row = static_cast<uint32_t>(job.run.row_begin) + in_run;
#pragma unroll
    for (uint32_t j = 0; j < DIM / 8; ++j) {
      if (8 * j >= args.head_dim) continue;
      const uint32_t col = head * args.head_dim + 8 * j + Warp::lane() % 4 * 2;
      *reinterpret_cast<uint32_t*>(out + activation_offset(row, col, args.num_q * args.head_dim, args.tiled)) =
          pack_bf16(warp.acc[j][2 * i] * scale, warp.acc[j][2 * i + 1] * scale);
    }
  }
}

// By all consumers.
template <uint32_t DIM, uint32_t KEYS>
DISTMK_NOINLINE void run_attention_job() {
  const WideAttentionArgs& args = attention_plan().args;
  const AttentionJob& job = attention_plan().job;
  using Warp = WarpAttention<DIM, KEYS>;
  const uint32_t num_heads = job.num_heads, num_queries = static_cast<uint32_t>(job.run.num_rows) * num_heads;
  const auto first_new = static_cast<uint32_t>(job.run.kv_len - job.run.num_rows);
  const auto visible_of = [&](uint32_t query) { return first_new + min(query, num_queries - 1) / num_heads + 1; };
  const uint32_t num_keys = visible_of(job.first_query + Warp::JOB_QUERIES - 1);
  const uint32_t num_tiles = (num_keys + KV_ROWS - 1) / KV_ROWS;

  const KvLoader<DIM> loader(num_keys);
  static_assert(NUM_KV_BUFFERS * KV_ROWS == NUM_CONSUMERS, "a thread looks up one position of the first tiles");
  const uint32_t index = threadIdx.x % KV_ROWS;
  uint32_t found = loader.look_up(threadIdx.x / KV_ROWS, index);
  attention_plan().cache_rows[threadIdx.x / KV_ROWS][index] = found;
  barrier_sync<NUM_CONSUMERS>();
#pragma unroll 1
  for (uint32_t i = 0; i < NUM_KV_BUFFERS - 1; ++i) loader.copy(i);
  const bool looks_up = threadIdx.x < KV_ROWS;
  if (looks_up) found = loader.look_up(NUM_KV_BUFFERS, index);

  const uint32_t first_query = job.first_query + Warp::row_group() * QUERIES_PER_WARP;
  const uint32_t first_of_group = first_query / Warp::GROUP_QUERIES * Warp::GROUP_QUERIES;
  const bool has_queries = first_of_group < num_queries;
  const uint32_t query = first_query + Warp::lane() / 4;
  const uint32_t visible[2] = {visible_of(query), visible_of(query + 8)}, fewest = visible_of(first_query),
                 most = visible_of(first_of_group + Warp::GROUP_QUERIES - 1);
  const float scale = 1.4426950408889634f * rsqrtf(static_cast<float>(args.head_dim));
  Warp warp;
  warp.begin(args.head_dim, [&](uint32_t i) {
    const uint32_t own = min(query + 8 * i, num_queries - 1), row = own / num_heads;
    return at_operand<__nv_bfloat16>(args.q) + uint64_t{job.run.row_begin + row} * args.q_stride +
           uint64_t{job.first_head + own - row * num_heads} * args.head_dim;
  });
#pragma unroll 1
  for (uint32_t tile = 0; tile < num_tiles; ++tile) {
    await_copies<NUM_KV_BUFFERS - 2>();
    if constexpr (Warp::BY_WARPGROUPS) fence_copies();  // products by warpgroups read by the same proxy
    barrier_sync<NUM_CONSUMERS>();                      // the tile is there, and the last one's buffer is free
    loader.copy(tile + NUM_KV_BUFFERS - 1);
    if (looks_up) {
      attention_plan().cache_rows[tile % NUM_KV_BUFFERS][index] = found;  // of tile + NUM_KV_BUFFERS
      found = loader.look_up(tile + NUM_KV_BUFFERS + 1, index);
    }
    const uint32_t begin = tile * KV_ROWS + Warp::way() * KEYS;
    if (has_queries && begin < most) warp.step(tile, visible, begin + KEYS <= fewest, scale);
  }
  warp.reduce_sums();
  if constexpr (Warp::WAYS > 1) {
    if (Warp::way()) WayCombine<DIM, KEYS>::leave(warp);
    barrier_sync<NUM_CONSUMERS>();
    if (!Warp::way())
#pragma unroll 1
      for (uint32_t way = 1; way < Warp::WAYS; ++way) WayCombine<DIM, KEYS>::add(warp, way);
  }
  if (Warp::way() == 0) store_attention<DIM>(job, query, num_queries, warp);
}

}  // namespace wide
}  // namespace distmk
