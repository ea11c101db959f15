// One job of wide attention: O = softmax(Q K^T / sqrt(d)) V of a block of queries, FlashAttention-2 (Dao,
// arXiv:2307.08691) with mma.m16n8k16. A query is a (row, head) pair of a run and a KV head: the heads of a GQA group
// share the K and V tiles. The eight warps are row groups of 16 queries times ways: a way takes KEYS positions of every
// KV tile, and the ways are combined at the end. Many ways are for jobs with few queries.
#pragma once
#include "device/attention/lse.cuh"
#include "device/core/bf16.cuh"
#include "device/wide/runs.cuh"

namespace distmk {
namespace wide {

constexpr uint32_t KV_ROWS = 64;        // positions of a KV tile
constexpr uint32_t NUM_KV_BUFFERS = 4;  // of a K and a V tile each
constexpr uint32_t QUERIES_PER_WARP = 16;
constexpr uint32_t MAX_HEAD_DIM = 128;

struct AttentionJob {
  BatchRun run;
  uint32_t kv_head, first_head, num_heads;  // query heads of this rank that share the KV head
  uint32_t first_query;                     // numbered row * num_heads + head
};

// DIM: head_dim rounded up to a size that the loops over a head know; the elements behind it are zeros.
template <uint32_t DIM>
struct KvBuffers {
  static constexpr uint32_t ROW_BYTES = DIM * sizeof(__nv_bfloat16), TILE_BYTES = KV_ROWS * ROW_BYTES, CHUNKS = DIM / 8,
                            ROWS_PER_PASS = NUM_CONSUMERS / CHUNKS, PASSES = KV_ROWS / ROWS_PER_PASS,
                            BYTES = 2 * NUM_KV_BUFFERS * TILE_BYTES;
  static_assert(ROWS_PER_PASS % 8 == 0, "a thread's rows have the same swizzle");

  DISTMK_FN static uint32_t k(uint32_t tile) {
    return shared_address(shared().stages) + tile % NUM_KV_BUFFERS * 2 * TILE_BYTES;
  }
  DISTMK_FN static uint32_t v(uint32_t tile) { return k(tile) + TILE_BYTES; }
};

// What a thread copies of each KV tile: the same chunk of 16 bytes of some rows. In shared memory chunk c of row r is
// chunk c ^ r % 8, so that ldmatrix meets no bank twice; the caches have a swizzle of their own.
template <uint32_t DIM>
class KvLoader {
 public:
  using Buffers = KvBuffers<DIM>;

  DISTMK_FN KvLoader(const Context& context, const WideAttentionArgs& args, const AttentionJob& job, uint32_t num_keys)
      : context_(context), args_(args), job_(job), num_keys_(num_keys) {
    const uint32_t row = context.team.index / Buffers::CHUNKS, chunk = context.team.index % Buffers::CHUNKS;
    const uint32_t swizzle = swizzles_cache(args.head_dim, args.page_size) ? row % 2 * 4 : row % 8;
    has_elements_ = 8 * chunk < args.head_dim;
    offset_ = has_elements_ ? 8 * chunk : 0;
    row_ = row;
    dst_ = row * Buffers::ROW_BYTES + (chunk ^ swizzle) * 16;
  }
  // Looks up the cache rows of a tile.
  DISTMK_FN void look_up(uint32_t tile, uint32_t (&rows)[Buffers::PASSES]) const {
#pragma unroll
    for (uint32_t i = 0; i < Buffers::PASSES; ++i) {
      const uint32_t position = min(tile * KV_ROWS + row_ + i * Buffers::ROWS_PER_PASS, num_keys_ - 1);
      rows[i] = cache_row(context_, args_, static_cast<uint32_t>(job_.run.slot), job_.kv_head, position);
    }
  }
  // Positions from num_keys on are zeros: weights of 0 times NaN would be NaN.
  DISTMK_FN void copy(uint32_t tile, const uint32_t (&rows)[Buffers::PASSES]) const {
    if (tile * KV_ROWS < num_keys_ && has_elements_) {
      const auto *k = context_.at<__nv_bfloat16>(args_.k_cache) + offset_,
                 *v = context_.at<__nv_bfloat16>(args_.v_cache) + offset_;
      const uint32_t dst = Buffers::k(tile) + dst_;
#pragma unroll
      for (uint32_t i = 0; i < Buffers::PASSES; ++i) {
        const uint32_t row = i * Buffers::ROWS_PER_PASS;
        const bool wanted = tile * KV_ROWS + row_ + row < num_keys_;
        const uint64_t at = uint64_t{rows[i]} * args_.head_dim;
        copy_chunk(dst + row * Buffers::ROW_BYTES, k + at, wanted);
        copy_chunk(dst + row * Buffers::ROW_BYTES + Buffers::TILE_BYTES, v + at, wanted);
      }
    }
    commit_copies();
  }

 private:
  const Context& context_;
  const WideAttentionArgs& args_;
  const AttentionJob& job_;
  uint32_t num_keys_, row_, offset_, dst_;
  bool has_elements_;
};

// The chunks behind head_dim in all buffers.
template <uint32_t DIM>
DISTMK_FN void zero_padding(const Context& context, uint32_t head_dim) {
  using Buffers = KvBuffers<DIM>;
  const uint32_t padding = (DIM - head_dim) / 8;
  for (uint32_t i = context.team.index; i < padding * (Buffers::BYTES / Buffers::ROW_BYTES); i += context.team.size) {
    const uint32_t row = i / padding, chunk = head_dim / 8 + i % padding;
    *reinterpret_cast<uint4*>(shared().stages + row * Buffers::ROW_BYTES + (chunk ^ row % 8) * 16) = zero_chunk();
  }
}

// A warp's 16 queries over its ways of the tiles. Lane 4 g + t has queries g and g + 8, and of each t's columns of
// every eight (see `multiply`).
template <uint32_t DIM, uint32_t KEYS>
struct WarpAttention {
  static constexpr uint32_t WAYS = KV_ROWS / KEYS, ROW_GROUPS = NUM_WARPS / WAYS,
                            JOB_QUERIES = ROW_GROUPS * QUERIES_PER_WARP;
  using Buffers = KvBuffers<DIM>;

  uint32_t q[DIM / 16][4];
  float acc[DIM / 8][4];
  LogSumExp<Base2> softmax[2];  // the sum is of this lane's positions until reduce_sums()

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
  // S += Q K^T. A lane gives the row of one of the four 8 x 8 matrices of 16 positions and 16 elements.
  DISTMK_FN void multiply_qk(uint32_t tile, float (&s)[KEYS / 8][4]) const {
    const uint32_t l = lane(), row = tile + (l / 16 * 8 + l % 8) * Buffers::ROW_BYTES,
                   swizzle = (l / 8 % 2 ^ l % 8) * 16;
#pragma unroll
    for (uint32_t k = 0; k < DIM / 16; ++k) {
      const uint32_t address = row + (32 * k ^ swizzle);
#pragma unroll
      for (uint32_t n = 0; n < KEYS / 16; ++n) {
        uint32_t b[4];
        ldmatrix_x4(address + n * 16 * Buffers::ROW_BYTES, b);
        multiply(q[k], b[0], b[1], s[2 * n]);
        multiply(q[k], b[2], b[3], s[2 * n + 1]);
      }
    }
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
    const uint32_t l = lane(), row = tile + l % 16 * Buffers::ROW_BYTES, swizzle = (l / 16 ^ l % 8) * 16;
#pragma unroll
    for (uint32_t k = 0; k < KEYS / 16; ++k) {
      const uint32_t a[4] = {pack_bf16(p[2 * k][0], p[2 * k][1]), pack_bf16(p[2 * k][2], p[2 * k][3]),
                             pack_bf16(p[2 * k + 1][0], p[2 * k + 1][1]), pack_bf16(p[2 * k + 1][2], p[2 * k + 1][3])};
#pragma unroll
      for (uint32_t n = 0; n < DIM / 16; ++n) {
        uint32_t b[4];
        ldmatrix_x4_transposed(row + k * 16 * Buffers::ROW_BYTES + (32 * n ^ swizzle), b);
        multiply(a, b[0], b[1], acc[2 * n]);
        multiply(a, b[2], b[3], acc[2 * n + 1]);
      }
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
    static_assert(KvBuffers<DIM>::BYTES + BYTES <= sizeof(Shared::stages), "");
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

// By all consumers.
template <uint32_t DIM, uint32_t KEYS>
DISTMK_FN void run_attention_job(const Context& context, const WideAttentionArgs& args, const AttentionJob& job) {
  using Warp = WarpAttention<DIM, KEYS>;
  const uint32_t num_heads = job.num_heads, num_queries = static_cast<uint32_t>(job.run.num_rows) * num_heads;
  const auto first_new = static_cast<uint32_t>(job.run.kv_len - job.run.num_rows);
  const auto visible_of = [&](uint32_t query) { return first_new + min(query, num_queries - 1) / num_heads + 1; };
  const uint32_t num_keys = visible_of(job.first_query + Warp::JOB_QUERIES - 1);
  const uint32_t num_tiles = (num_keys + KV_ROWS - 1) / KV_ROWS;

  const KvLoader<DIM> loader(context, args, job, num_keys);
  uint32_t rows[NUM_KV_BUFFERS - 1][KvBuffers<DIM>::PASSES];
#pragma unroll
  for (uint32_t i = 0; i < NUM_KV_BUFFERS - 1; ++i) loader.look_up(i, rows[i]);
#pragma unroll
  for (uint32_t i = 0; i < NUM_KV_BUFFERS - 1; ++i) loader.copy(i, rows[i]);
  loader.look_up(NUM_KV_BUFFERS - 1, rows[0]);

  const uint32_t first_query = job.first_query + Warp::row_group() * QUERIES_PER_WARP;
  const bool has_queries = first_query < num_queries;
  const uint32_t query = first_query + Warp::lane() / 4;
  const uint32_t visible[2] = {visible_of(query), visible_of(query + 8)}, fewest = visible_of(first_query),
                 most = visible_of(first_query + QUERIES_PER_WARP - 1);
  const float scale = 1.4426950408889634f * rsqrtf(static_cast<float>(args.head_dim));
  Warp warp;
  warp.begin(args.head_dim, [&](uint32_t i) {
    const uint32_t own = min(query + 8 * i, num_queries - 1), row = own / num_heads;
    return context.at<__nv_bfloat16>(args.q) + uint64_t{job.run.row_begin + row} * args.q_stride +
           uint64_t{job.first_head + own - row * num_heads} * args.head_dim;
  });
#pragma unroll 1
  for (uint32_t tile = 0; tile < num_tiles; ++tile) {
    await_copies<NUM_KV_BUFFERS - 2>();
    context.team.sync();  // the tile is there, and the last one's buffer is free
    loader.copy(tile + NUM_KV_BUFFERS - 1, rows[0]);
    loader.look_up(tile + NUM_KV_BUFFERS, rows[0]);
    const uint32_t begin = tile * KV_ROWS + Warp::way() * KEYS;
    if (has_queries && begin < most) warp.step(tile, visible, begin + KEYS <= fewest, scale);
  }
  warp.reduce_sums();
  if constexpr (Warp::WAYS > 1) {
    if (Warp::way()) WayCombine<DIM, KEYS>::leave(warp);
    context.team.sync();
    if (!Warp::way())
#pragma unroll 1
      for (uint32_t way = 1; way < Warp::WAYS; ++way) WayCombine<DIM, KEYS>::add(warp, way);
  }
  if (Warp::way() == 0 && has_queries) {
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      if (query + 8 * i >= num_queries) continue;
      const float scale_out = normalizer(warp.softmax[i].sum);
      const uint32_t in_run = (query + 8 * i) / num_heads, head = job.first_head + query + 8 * i - in_run * num_heads,
                     row = static_cast<uint32_t>(job.run.row_begin) + in_run;
      auto* out = context.at<__nv_bfloat16>(args.out);
#pragma unroll
      for (uint32_t j = 0; j < DIM / 8; ++j)
        if (8 * j < args.head_dim) {
          const uint32_t col = head * args.head_dim + 8 * j + Warp::lane() % 4 * 2;
          *reinterpret_cast<uint32_t*>(out + activation_offset(row, col, args.num_q * args.head_dim, args.tiled)) =
              pack_bf16(warp.acc[j][2 * i] * scale_out, warp.acc[j][2 * i + 1] * scale_out);
        }
    }
  }
}

}  // namespace wide
}  // namespace distmk
