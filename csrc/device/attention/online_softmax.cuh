// The arithmetic of split-KV attention. Per KV tile: S = Q K^T, P = exp2(S - m), O += P V on tensor cores (m16n8k16,
// bf16 in, f32 out), with the online softmax's running (m, l). At the end, the eight warps' partials are combined in
// shared memory, and the split's partial is stored. Q: [Q_TILE = 8 queries, d]; K, V: [KV_TILE = 16 positions, d]; S,
// P: [8, 16]; O: [8, d]. Q and P are each split into bf16 high and low halves (Halves), so rounding K and V to bf16
// dominates.
#pragma once
#include "device/attention/kv_tile.cuh"
#include "device/attention/lse.cuh"
#include "device/comm/lamport.cuh"

namespace distmk {
namespace attention {

// groupID and threadID_in_group of PTX's fragment layouts. Opaque, see ParamsOf::lane.
DISTMK_FN uint32_t mma_group() { return opaque(threadIdx.x) % 32 / 4; }
DISTMK_FN uint32_t mma_thread() { return opaque(threadIdx.x) % 4; }

// S += Q K^T for N_TILES blocks of 8 positions. k(i, j) is a lane's K of block i, elements from k_element(lane, j) on.
// A lane gets the scores of query mma_group() at positions 2 t and 2 t + 1, t = mma_thread(). Scores from Q's high
// halves are in scores[i][0..1], scores from its low halves in scores[i][2..3].
template <uint32_t N_TILES, class P, class K>
DISTMK_FN void multiply_qk(const P& p, const K& k, float (&scores)[N_TILES][4]) {
  const uint32_t lane = p.lane();
  const uint32_t* query = p.query(lane / 4);
#pragma unroll
  for (uint32_t j = 0; j < P::MAX_DIM / 32; ++j) {
    if (32 * j % HEAD_DIM_STEP == 0 && 32 * j >= p.head_dim()) break;
    const auto* chunks = reinterpret_cast<const uint4*>(query + k_element(lane, j));
    const uint4 q[2] = {chunks[0], chunks[1]};
#pragma unroll
    for (uint32_t i = 0; i < N_TILES; ++i) {
      const uint4 key = k(i, j);
      multiply({q[0].x, q[0].y, q[0].z, q[0].w}, key.x, key.y, scores[i]);
      multiply({q[1].x, q[1].y, q[1].z, q[1].w}, key.z, key.w, scores[i]);
    }
  }
}

// Applies the score variant (such as a cap) to a KV tile. It needs whole scores, so it adds high and low halves and
// leaves the low ones zero.
DISTMK_FN void vary_scores(float (&scores)[2][4], const ScoreArgs& args) {
#pragma unroll
  for (auto& block : scores)
#pragma unroll
    for (uint32_t e = 0; e < 2; ++e) {
      block[e] = vary_score<Base2>(block[e] + block[2 + e], args);
      block[2 + e] = 0.0f;
    }
}

// (m, l, O) of the KV tiles that one warp has visited.
template <uint32_t MAX_DIM>
struct WarpPartialOf {
  LogSumExp<Base2> softmax;  // for query mma_group(); the sum covers only this lane's positions until reduce_sum()
  // O^T: acc[n][e] and acc[n][2 + e] belong to query 2 mma_thread() + e. They are element 64 (n / 4) + 8 mma_group() +
  // 2 (n % 4) and the next one.
  float acc[MAX_DIM / 16][4] = {};

  // Online softmax step. Turns the scores of one KV tile, or of two (N_TILES = 4), into the weights P. They are high
  // and low halves, as B fragments of O^T = V^T P^T. Mask: the query sees [visible_begin, visible_end) of the first
  // tile, and all of the second if `two`. FIRST: the warp has visited no tile before.
  template <bool FIRST, uint32_t N_TILES>
  DISTMK_FN void softmax_step(uint32_t tile_index, uint32_t visible_begin, uint32_t visible_end, bool two,
                              const float (&scores)[N_TILES][4], uint32_t (&weights)[N_TILES / 2][2][2]) {
    float s[N_TILES][2], tile_max = -INFINITY;
#pragma unroll
    for (uint32_t i = 0; i < N_TILES; ++i)
#pragma unroll
      for (uint32_t e = 0; e < 2; ++e) {
        const uint32_t position = tile_index * KV_TILE + 8 * i + 2 * mma_thread() + e;
        const bool visible = i < 2 ? position >= visible_begin && position < visible_end : two;
        s[i][e] = visible ? scores[i][e] + scores[i][2 + e] : -INFINITY;
        tile_max = fmaxf(tile_max, s[i][e]);
      }
    tile_max = lanes_max<4>(tile_max);
    if (FIRST)
      softmax.max = tile_max;
    else
      rescale(softmax.raise(tile_max));
#pragma unroll
    for (uint32_t i = 0; i < N_TILES; ++i) {
      const float a = softmax.weight(s[i][0]), b = softmax.weight(s[i][1]);
      const Halves halves(a, b);
      softmax.sum += a + b;
      weights[i / 2][0][i % 2] = halves.high;
      weights[i / 2][1][i % 2] = halves.low;
    }
  }

  // O^T += V^T P^T. A lane's 16 bytes of V are eight rows of V^T, two per product.
  DISTMK_FN void multiply_pv(const KvTileOf<MAX_DIM>& tile, uint32_t dim, const uint32_t (&weights)[2][2]) {
    const auto& v = tile.v;
#pragma unroll
    for (uint32_t j = 0; j < MAX_DIM / 64; ++j) {
      if (64 * j >= dim) break;
      const uint32_t words[4][4] = {{v[0][j].x, v[0][j].y, v[0][j].z, v[0][j].w},
                                    {v[1][j].x, v[1][j].y, v[1][j].z, v[1][j].w},
                                    {v[2][j].x, v[2][j].y, v[2][j].z, v[2][j].w},
                                    {v[3][j].x, v[3][j].y, v[3][j].z, v[3][j].w}};
#pragma unroll
      for (uint32_t n = 0; n < 4; ++n) {
        constexpr uint32_t LOWER = 0x5410, UPPER = 0x7632;  // selects the bf16 of two positions
        const uint32_t rows[4] = {
            __byte_perm(words[0][n], words[1][n], LOWER), __byte_perm(words[0][n], words[1][n], UPPER),
            __byte_perm(words[2][n], words[3][n], LOWER), __byte_perm(words[2][n], words[3][n], UPPER)};
        multiply(rows, weights[0][0], weights[0][1], acc[4 * j + n]);
        multiply(rows, weights[1][0], weights[1][1], acc[4 * j + n]);
      }
    }
  }

  // Multiplies O by `factor`. Each lane passes the factor of query mma_group().
  DISTMK_FN void rescale(float factor) {
    const float factors[2] = {__shfl_sync(~0u, factor, 8 * mma_thread()),
                              __shfl_sync(~0u, factor, 8 * mma_thread() + 4)};
#pragma unroll
    for (uint32_t n = 0; n < MAX_DIM / 16; ++n)
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) acc[n][i] *= factors[i % 2];
  }

  // Sums l over the four lanes that share a query, after the last tile.
  DISTMK_FN void reduce_sum() { softmax.sum = lanes_sum<4>(softmax.sum); }

  // Stores this lane's elements of queries `first` to `end` - 1 to shared memory, query i at `out` + (i - first) *
  // STRIDE. The stored maximum is relative to base e.
  DISTMK_FN void store(float* out, uint32_t first, uint32_t end) const {
    constexpr uint32_t STRIDE = MAX_DIM + 4;
    const uint32_t own_query = mma_group();
    if (mma_thread() == 0 && own_query >= first && own_query < end)
      *reinterpret_cast<float2*>(out + (own_query - first) * STRIDE + MAX_DIM) = {softmax.max * LN_2, softmax.sum};
#pragma unroll
    for (uint32_t e = 0; e < 2; ++e) {
      const uint32_t query = 2 * mma_thread() + e;
      if (query < first || query >= end) continue;
#pragma unroll
      for (uint32_t n = 0; n < MAX_DIM / 16; n += 2)
        *reinterpret_cast<float4*>(out + (query - first) * STRIDE + n / 4 * 64 + 8 * mma_group() + n % 4 * 2) = {
            acc[n][e], acc[n][2 + e], acc[n + 1][e], acc[n + 1][2 + e]};
    }
  }
};

using WarpPartial = WarpPartialOf<HOT_HEAD_DIM>;

constexpr uint32_t LANES_PER_SLICE = COMBINE_SLICE / 4, SLICES_PER_PART = HOT_HEAD_DIM / COMBINE_SLICE;

// Address of this lane's four elements in one part of a query's split partial, behind its header. Computed before the
// warps meet, because some warps have nothing else to do until then.
template <class P>
DISTMK_FN void* partial_at(const P& p, uint32_t query, uint32_t part) {
  const uint32_t lane = p.lane(), slices = (p.head_dim() + COMBINE_SLICE - 1) / COMBINE_SLICE;
  if (p.fuses_combine())
    return p.fused_partial_at(p.args.fused_partials, query, p.instance.split) + FUSED_PARTIAL_HEADER +
           part * HOT_HEAD_DIM + 4 * lane;
  const uint32_t row = p.row_of(query), slice = (p.first_head + query - row * p.num_heads) * slices +
                                                part * SLICES_PER_PART + lane / LANES_PER_SLICE;
  return p.f32(p.args.partials) +
         partial_of_slice(slice, p.run.row_begin + row, p.instance.split, p.args.max_kv_splits) +
         PARTIAL_HEADER_FLOATS + lane % LANES_PER_SLICE * 4;
}

// Combines the warps' partials of one part of a query (number `index` of those in shared memory) and stores the split's
// partial at `out`. A warp takes a part, a lane four elements, and additions are always in the order of steps. Lane l
// has the weight of the warp whose first step is l % NUM_WARPS; it is 0 if that warp had no tile. The second half of
// the warps is skipped if none of them had one.
template <class P>
DISTMK_FN void combine_warps(const P& p, uint32_t index, uint32_t part, void* out) {
  constexpr uint32_t HALF = NUM_WARPS / 2;
  const uint32_t lane = p.lane();
  const auto of_step = [&](uint32_t step) { return p.warp_partial(step, index); };
  const float2 mine = *reinterpret_cast<const float2*>(of_step(lane % NUM_WARPS) + P::MAX_DIM);
  LogSumExp<BaseE> total;
  total.max = lanes_max<NUM_WARPS>(mine.x);
  const float weight = total.weight(mine.x);
  total.sum = lanes_sum<NUM_WARPS>(mine.y * weight);
  float4 acc = {0, 0, 0, 0};
#pragma unroll
  for (uint32_t first = 0; first < NUM_WARPS; first += HALF) {
    if (first >= p.num_tiles()) break;
#pragma unroll
    for (uint32_t step = first; step < first + HALF; ++step) {
      const float4 o = *reinterpret_cast<const float4*>(of_step(step) + part * HOT_HEAD_DIM + 4 * lane);
      const float w = __shfl_sync(~0u, weight, step);
      acc.x += o.x * w, acc.y += o.y * w, acc.z += o.z * w, acc.w += o.w * w;
    }
  }
  if (part * HOT_HEAD_DIM + 4 * lane >= p.head_dim()) return;
  if (p.fuses_combine()) {
    const float scale = normalizer(total.sum);
    const uint32_t pairs[2] = {pack_bf16(acc.x * scale, acc.y * scale), pack_bf16(acc.z * scale, acc.w * scale)};
    publish_store(static_cast<uint2*>(out), {lamport_pair(pairs[0]), lamport_pair(pairs[1])});
    // The header is stored last, because readers at first poll the header alone.
    if (lane == 0 && part == 0)
      publish(reinterpret_cast<float*>(static_cast<__nv_bfloat16*>(out) - FUSED_PARTIAL_HEADER), total.log());
    return;
  }
  if (lane % LANES_PER_SLICE == 0)
    publish_four(static_cast<float*>(out) - PARTIAL_HEADER_FLOATS, {total.max, total.sum, 0, 0});
  publish_four(static_cast<float*>(out), acc);
}

// Zeroes the fused partials of an earlier task (Lamport buffers, rotated), whatever number of splits it had. Each split
// of this task zeroes its share of them, one head per warp.
template <class P>
DISTMK_FN void reset_fused_partials(const P& p) {
  const uint32_t lane = p.lane();
  if (!p.args.lamport_reset || p.instance.run != 0 || 4 * lane >= p.head_dim()) return;
#pragma unroll 1
  for (uint32_t query = own_thread() / 32; query < p.num_heads; query += NUM_WARPS)
#pragma unroll 1
    for (uint32_t split = p.instance.split; split < max_fused_splits(p.args.max_kv_splits);
         split += p.instance.num_splits) {
      __nv_bfloat16* out = p.fused_partial_at(p.args.lamport_reset, query, split);
      if (lane == 0) lamport_reset(reinterpret_cast<float*>(out));
#pragma unroll
      for (uint32_t part = 0; part < P::PARTS; ++part)
        if (part == 0 || part * HOT_HEAD_DIM + 4 * lane < p.head_dim())
          lamport_reset(reinterpret_cast<uint2*>(out + FUSED_PARTIAL_HEADER + part * HOT_HEAD_DIM) + lane);
    }
}

}  // namespace attention
}  // namespace distmk
