// A warp's part in a block job of attention (attention_block.cuh): products on tensor cores, and the online softmax
// between them. Products of a warpgroup run asynchronously, so a tile's softmax is computed while the previous tile's
// values are multiplied, as in FlashAttention-3 (Shah et al., arXiv:2407.08608).
#pragma once
#include "device/jobs/kv_tiles.cuh"
#include "device/jobs/query_tile.cuh"
#include "platform/wgmma.cuh"

namespace distmk {
namespace jobs {

// Number of warps that share the output's columns. With large heads there are two, and each multiplies all scores.
template <uint32_t DIM>
constexpr uint32_t COLUMN_SHARES = DIM <= MAX_HEAD_DIM / 2 ? 1 : 2;

// A warp's 16 queries, over its way's positions of each KV tile, and its share of the output's columns.
template <uint32_t DIM, uint32_t KEYS>
struct WarpAttention : QueryTile<DIM / COLUMN_SHARES<DIM>, KEYS> {
  static constexpr uint32_t SHARES = COLUMN_SHARES<DIM>, COLS = DIM / SHARES, WAYS = KV_ROWS / KEYS,
                            ROW_GROUPS = NUM_WARPS / WAYS / SHARES, JOB_QUERIES = ROW_GROUPS * QUERIES_PER_WARP;
  static_assert(WAYS == 1 || SHARES == 1, "");
  // Whether the four warps of a warpgroup have the same way, so that they multiply together.
  static constexpr bool BY_WARPGROUPS = ROW_GROUPS >= 4;
  static constexpr uint32_t GROUP_QUERIES = (BY_WARPGROUPS ? 4 : 1) * QUERIES_PER_WARP;
  using Buffers = KvBuffers<DIM>;
  static_assert(!BULK_COPIES || !BY_WARPGROUPS ||
                    Buffers::BYTES + ROW_GROUPS / 4 * Buffers::TILE_BYTES <= overlay_bytes(Overlay::KV_BUFFERS),
                "");

  using Tile = QueryTile<COLS, KEYS>;
  using Tile::acc, Tile::lane, Tile::p, Tile::SCORES, Tile::softmax;
  // Warpgroups read their queries from shared memory, because no registers are left for them.
  uint32_t q[BY_WARPGROUPS ? 1 : DIM / 16][4];

  DISTMK_FN static uint32_t row_group() { return threadIdx.x / 32 % ROW_GROUPS; }
  DISTMK_FN static uint32_t way() { return SHARES == 1 ? threadIdx.x / 32 / ROW_GROUPS : 0; }
  DISTMK_FN static uint32_t share() { return SHARES == 1 ? 0 : threadIdx.x / 32 / ROW_GROUPS; }
  DISTMK_FN static uint32_t first_col() { return share() * COLS; }

  // Loads the queries. query(i) returns the pointer to one of the lane's two queries.
  template <class Query>
  DISTMK_FN void begin(uint32_t head_dim, const Query& query) {
    this->clear();
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
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

  // Start S = Q K^T of a tile, O += P V of a tile whose weights are there, or both. The lane's registers of a product
  // are in use until end_scores() and end_values(), which are called in this order. In between, the thread may do other
  // work.
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
  // PENDING: 1 if products with values are still running.
  template <uint32_t PENDING>
  DISTMK_FN void end_scores(float (&s)[SCORES]) {
    if constexpr (BY_WARPGROUPS) tensor::await<KEYS, PENDING>();
    settle(s);
  }
  // Waits for the products with values, after the computation of `before`.
  template <uint32_t COUNT>
  DISTMK_FN void end_values(float (&before)[COUNT]) {
    settle(before);
    if constexpr (BY_WARPGROUPS) tensor::await<KEYS>();
    settle(flat());
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
    return shared().at<Overlay::KV_BUFFERS>() + Buffers::BYTES + row_group() / 4 * Buffers::TILE_BYTES;
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

}  // namespace jobs
}  // namespace distmk
