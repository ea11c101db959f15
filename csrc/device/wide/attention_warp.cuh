// A warp's part in a job of wide attention (attention_block.cuh): products on tensor cores and the online softmax
// between them. Products of a warpgroup run beside its threads, so that a tile's softmax is worked out while the values
// of the one before are multiplied, as in FlashAttention-3 (Shah et al., arXiv:2407.08608).
#pragma once
#include "device/attention/lse.cuh"
#include "device/attention/softcap.cuh"
#include "device/wide/kv_tiles.cuh"
#include "platform/wgmma.cuh"

namespace distmk {
namespace wide {

constexpr uint32_t QUERIES_PER_WARP = 16;

// A warp's 16 queries over its ways of the tiles, and its share of the output's columns. Lane 4 g + t has queries g and
// g + 8, and of each t's columns of every eight (see `multiply`).
template <uint32_t DIM, uint32_t KEYS>
struct WarpAttention {
  // Of large heads, the warps that share the columns multiply the same scores each.
  static constexpr uint32_t SHARES = DIM <= MAX_HEAD_DIM / 2 ? 1 : 2, COLS = DIM / SHARES, WAYS = KV_ROWS / KEYS,
                            ROW_GROUPS = NUM_WARPS / WAYS / SHARES, JOB_QUERIES = ROW_GROUPS * QUERIES_PER_WARP;
  static_assert(WAYS == 1 || SHARES == 1, "");
  // The four warps of a warpgroup have the same way, so that they multiply together.
  static constexpr bool BY_WARPGROUPS = ROW_GROUPS >= 4;
  static constexpr uint32_t GROUP_QUERIES = (BY_WARPGROUPS ? 4 : 1) * QUERIES_PER_WARP;
  using Buffers = KvBuffers<DIM>;
  static_assert(!BULK_COPIES || !BY_WARPGROUPS ||
                    Buffers::BYTES + ROW_GROUPS / 4 * Buffers::TILE_BYTES <= sizeof(Shared::stages),
                "");

  static constexpr uint32_t SCORES = KEYS / 2;  // of a lane: c registers of eight positions after each other
  // Warpgroups read their queries from shared memory, as there are no registers for them.
  uint32_t q[BY_WARPGROUPS ? 1 : DIM / 16][4], p[KEYS / 16][4];
  float acc[COLS / 8][4];
  LogSumExp<Base2> softmax[2];  // the sum is of this lane's positions until reduce_sums()

  // Opaque where an address follows from it: the compiler would keep one for each step of a loop.
  DISTMK_FN static uint32_t lane() { return threadIdx.x % 32; }
  DISTMK_FN static uint32_t row_group() { return threadIdx.x / 32 % ROW_GROUPS; }
  DISTMK_FN static uint32_t way() { return SHARES == 1 ? threadIdx.x / 32 / ROW_GROUPS : 0; }
  DISTMK_FN static uint32_t share() { return SHARES == 1 ? 0 : threadIdx.x / 32 / ROW_GROUPS; }
  DISTMK_FN static uint32_t first_col() { return share() * COLS; }

  // `query` gives the pointer to one of the lane's two queries.
  template <class Query>
  DISTMK_FN void begin(uint32_t head_dim, const Query& query) {
#pragma unroll
    for (uint32_t i = 0; i < COLS / 8; ++i) acc[i][0] = acc[i][1] = acc[i][2] = acc[i][3] = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      softmax[i] = {};
      const auto* from = reinterpret_cast<const uint32_t*>(query(i)) + lane() % 4;
#pragma unroll
      for (uint32_t j = 0; j < DIM / 8; ++j) {
        const uint32_t loaded = 8 * j < head_dim ? __ldcg(from + 4 * j) : 0;
        if constexpr (BY_WARPGROUPS)
          keep_query(i, j, loaded);
        else
          q[j / 2][i + j % 2 * 2] = loaded;
      }
    }
  }

  // Starts S = Q K^T of a tile; and O += P V of another, if its weights are there. The lane's registers of both are in
  // use until end_scores() and end_values(), which come in this order; in between, the thread may do something else.
  DISTMK_FN void begin_scores(uint32_t tile, float (&s)[SCORES]) {
#pragma unroll
    for (float& score : s) score = 0.0f;
    settle(s);
    begin_products();
    multiply_qk(Buffers::k(tile) + way() * KEYS * Buffers::ROW_BYTES, s);
  }
  DISTMK_FN void begin_scores_and_values(uint32_t tile, uint32_t of_values, float (&s)[SCORES]) {
    settle(flat());
    settle(p);
    begin_scores(tile, s);
    multiply_pv(of_values);
  }
  DISTMK_FN void begin_values(uint32_t tile) {
    settle(flat());
    settle(p);
    begin_products();
    multiply_pv(tile);
  }
  // PENDING: 1 if products with values run on.
  template <uint32_t PENDING>
  DISTMK_FN void end_scores(float (&s)[SCORES]) {
    if constexpr (BY_WARPGROUPS) tensor::await<KEYS, PENDING>();
    settle(s);
  }
  // Behind what becomes `before`.
  template <uint32_t COUNT>
  DISTMK_FN void end_values(float (&before)[COUNT]) {
    settle(before);
    if constexpr (BY_WARPGROUPS) tensor::await<KEYS>();
    settle(flat());
  }

  // Scores by `scale`, which has log2(e), and capped.
  DISTMK_FN static void cap(float (&s)[SCORES], float scale, float softcap) {
#pragma unroll
    for (uint32_t i = 0; i < SCORES; ++i) s[i] = attention::capped(s[i] * scale, softcap);
  }
  // Position of a lane's score i of a tile.
  DISTMK_FN static uint32_t position(uint32_t tile, uint32_t i) {
    return tile * KV_ROWS + way() * KEYS + lane() % 4 * 2 + i / 4 * 8 + i % 2;
  }
  // The lane's queries see the `window` positions before end[i]. Those of the tile may be among them or not.
  DISTMK_FN static void mask_from(uint32_t tile, const uint32_t (&end)[2], float (&s)[SCORES]) {
#pragma unroll
    for (uint32_t i = 0; i < SCORES; ++i)
      if (position(tile, i) >= end[i % 4 / 2]) s[i] = -INFINITY;
  }
  DISTMK_FN static void mask_before(uint32_t tile, const uint32_t (&end)[2], uint32_t window, float (&s)[SCORES]) {
#pragma unroll
    for (uint32_t i = 0; i < SCORES; ++i)
      if (position(tile, i) + window < end[i % 4 / 2]) s[i] = -INFINITY;
  }
  // Online softmax: scores become weights. The accumulator is then to be rescaled by `factor`.
  // `scale`: of scores, times log2(e).
  DISTMK_FN void weigh(float (&s)[SCORES], float scale, float (&factor)[2]) {
    float minus_max[2];
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      float most = -INFINITY;
#pragma unroll
      for (uint32_t j = 2 * i; j < SCORES; j += 4) most = fmaxf(most, fmaxf(s[j], s[j + 1]));
      factor[i] = softmax[i].raise(attention::lanes_max<4>(most) * scale);
      minus_max[i] = -finite_max(softmax[i].max);
    }
#pragma unroll
    for (uint32_t i = 0; i < SCORES; ++i) {
      s[i] = Base2::exp(fmaf(s[i], scale, minus_max[i % 4 / 2]));
      softmax[i % 4 / 2].sum += s[i];
    }
  }
  // Weights as A fragments.
  DISTMK_FN void keep_weights(const float (&s)[SCORES]) {
#pragma unroll
    for (uint32_t k = 0; k < KEYS / 16; ++k)
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) p[k][i] = pack_bf16(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
  }
  DISTMK_FN void rescale(const float (&factor)[2]) {
    if (__all_sync(~0u, factor[0] == 1.0f && factor[1] == 1.0f)) return;  // as no maximum has changed
#pragma unroll
    for (uint32_t i = 0; i < COLS / 8; ++i) {
      acc[i][0] *= factor[0];
      acc[i][1] *= factor[0];
      acc[i][2] *= factor[1];
      acc[i][3] *= factor[1];
    }
  }

  DISTMK_FN void reduce_sums() {
    for (LogSumExp<Base2>& each : softmax) each.sum = attention::lanes_sum<4>(each.sum);
  }

 private:
  DISTMK_FN float (&flat()) [COLS / 2] { return reinterpret_cast<float (&)[COLS / 2]>(acc); } template <class Registers>
                            DISTMK_FN static void settle(Registers& registers) {
    if constexpr (BY_WARPGROUPS) tensor::settle(registers);
  }
  DISTMK_FN static void begin_products() {
    if constexpr (BY_WARPGROUPS) tensor::begin<KEYS>();
  }
  // Slots of a warpgroup's queries, behind the KV buffers.
  DISTMK_FN static char* queries() {
    static_assert(KV_ROWS == 64, "they are as large as those of a tile");
    return shared().stages + Buffers::BYTES + row_group() / 4 * Buffers::TILE_BYTES;
  }
  DISTMK_FN static void keep_query(uint32_t i, uint32_t chunk, uint32_t pair) {
    const uint32_t row = row_group() % 4 * 16 + lane() / 4 + 8 * i;
    if (way() == 0 && share() == 0)
      *reinterpret_cast<uint32_t*>(queries() + Buffers::offset(row, chunk, row % 8) + lane() % 4 * 4) = pair;
  }
  DISTMK_FN void multiply_qk(uint32_t tile, float (&s)[SCORES]) {
#pragma unroll
    for (uint32_t k = 0; k < DIM / 16; ++k) {
      const uint32_t slot = tile + k / 4 * Buffers::SLOT_BYTES;
      if constexpr (BY_WARPGROUPS)
        tensor::multiply_shared<KEYS>(s, shared_address(queries()) + k / 4 * Buffers::SLOT_BYTES, slot, k % 4);
      else
        tensor::multiply_by_mma<KEYS>(s, q[k], slot, k % 4);
    }
    if constexpr (BY_WARPGROUPS) tensor::commit<KEYS>();
  }
  DISTMK_FN void multiply_pv(uint32_t tile) {
    const uint32_t values =
        Buffers::v(tile) + way() * KEYS * Buffers::ROW_BYTES + first_col() / 64 * Buffers::SLOT_BYTES;
#pragma unroll
    for (uint32_t k = 0; k < KEYS / 16; ++k)
      if constexpr (BY_WARPGROUPS)
        tensor::multiply_rows<COLS>(flat(), p[k], values, k);
      else
        tensor::multiply_rows_by_mma<COLS>(flat(), p[k], values, k);
    if constexpr (BY_WARPGROUPS) tensor::commit<KEYS>();
  }
};

}  // namespace wide
}  // namespace distmk
