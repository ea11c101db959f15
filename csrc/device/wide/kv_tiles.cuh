// KV tiles of wide attention in shared memory: where they are, and how all consumers copy them from the paged cache.
#pragma once
#include "device/core/bf16.cuh"
#include "device/wide/attention_plan.cuh"

namespace distmk {
namespace wide {

// DIM: head_dim rounded up to a size that the loops over a head know; the elements behind it are zeros.
// There are COUNT buffers of keys and as many of values. A copy brings the keys of a tile and the values of the tile
// LAG before it, and runs AHEAD tiles ahead: where there are few buffers, those of keys are free earlier.
template <uint32_t DIM>
struct KvBuffers {
  static constexpr uint32_t COUNT = DIM <= MAX_HEAD_DIM / 2 ? 4 : 2, LAG = COUNT == 2, AHEAD = COUNT - 1 + LAG;
  static_assert(AHEAD <= LOOKED_UP_TILES, "");
  static constexpr uint32_t ROW_BYTES = 64 * sizeof(__nv_bfloat16), SLOT_BYTES = KV_ROWS * ROW_BYTES,
                            TILE_BYTES = DIM / 64 * SLOT_BYTES, CHUNKS = DIM / 8,
                            ROWS_PER_PASS = NUM_CONSUMERS / CHUNKS, PASSES = KV_ROWS / ROWS_PER_PASS,
                            BYTES = 2 * COUNT * TILE_BYTES;
  static_assert(ROWS_PER_PASS % 8 == 0, "a thread's rows have the same swizzle");

  DISTMK_FN static uint32_t k(uint32_t tile) { return shared_address(shared().stages) + tile % COUNT * 2 * TILE_BYTES; }
  DISTMK_FN static uint32_t v(uint32_t tile) { return k(tile) + TILE_BYTES; }
  // Chunk c of row r of a tile: slots of 64 columns, in which the chunks of a row are permuted.
  DISTMK_FN static uint32_t offset(uint32_t row, uint32_t chunk, uint32_t swizzle) {
    return chunk / 8 * SLOT_BYTES + row * ROW_BYTES + (chunk % 8 ^ swizzle) * 16;
  }
};

// What a thread copies of each KV tile: the same chunk of 16 bytes of some rows. In shared memory chunk c of row r is
// chunk c ^ r % 8, so that ldmatrix meets no bank twice; the caches have a swizzle of their own. What follows from the
// arguments is worked out where it is used, as there are no registers to keep it in.
template <uint32_t DIM>
class KvLoader {
 public:
  using Buffers = KvBuffers<DIM>;

  DISTMK_FN explicit KvLoader(uint32_t num_keys) : num_keys_(num_keys) {}
  // The cache row of position `index` of a tile.
  DISTMK_FN uint32_t look_up(uint32_t tile, uint32_t index) const {
    const uint32_t position = tile * KV_ROWS + index;
    if (position >= num_keys_) return 0;
    const WideAttentionArgs& args = attention_plan().args;
    const AttentionJob& job = attention_plan().job;
    return cache_row(at_operand<int32_t>(args.page_table), args, static_cast<uint32_t>(job.run.slot), job.kv_head,
                     job.first_position + position);
  }
  // The keys of `tile` and the values of the one LAG before, once the cache rows are in the plan. Positions from
  // num_keys on are zeros: weights of 0 times NaN would be NaN. So are those of tile -1.
  DISTMK_FN void copy(uint32_t tile) const {
    const WideAttentionArgs& args = attention_plan().args;
    const uint32_t chunk = opaque(threadIdx.x) % Buffers::CHUNKS, dim = args.head_dim, of_values = tile - Buffers::LAG;
    const uint32_t key = tile * KV_ROWS + row(), value = key - Buffers::LAG * KV_ROWS;
    if (tile * KV_ROWS < num_keys_ + Buffers::LAG * KV_ROWS && 8 * chunk < dim) {
      const auto *k = at_operand<__nv_bfloat16>(args.k_cache) + 8 * chunk,
                 *v = at_operand<__nv_bfloat16>(args.v_cache) + 8 * chunk;
      const uint32_t swizzle = swizzles_cache(dim, args.page_size) ? row() % 2 * 4 : row() % 8;
      const uint32_t offset = Buffers::offset(row(), chunk, swizzle);
      const uint32_t to_keys = Buffers::k(tile) + offset, to_values = Buffers::v(of_values) + offset;
#pragma unroll
      for (uint32_t i = 0; i < Buffers::PASSES; ++i) {
        const uint32_t ahead = i * Buffers::ROWS_PER_PASS;
        const uint64_t k_row = cache_row_of(tile, row() + ahead),
                       v_row = Buffers::LAG ? cache_row_of(of_values, row() + ahead) : k_row;
        copy_chunk(to_keys + ahead * Buffers::ROW_BYTES, k + k_row * dim, key + ahead < num_keys_);
        copy_chunk(to_values + ahead * Buffers::ROW_BYTES, v + v_row * dim, value + ahead < num_keys_);
      }
    }
    commit_copies();
  }

 private:
  uint32_t num_keys_;

  DISTMK_FN static uint64_t cache_row_of(uint32_t tile, uint32_t row) {
    return attention_plan().cache_rows[tile % LOOKED_UP_TILES][row];
  }
  DISTMK_FN static uint32_t row() { return opaque(threadIdx.x) / Buffers::CHUNKS; }
};

// The chunks behind head_dim in all buffers.
template <uint32_t DIM>
DISTMK_FN void zero_padding(uint32_t head_dim) {
  using Buffers = KvBuffers<DIM>;
  const uint32_t padding = (DIM - head_dim) / 8;
  for (uint32_t i = threadIdx.x; i < padding * KV_ROWS * 2 * Buffers::COUNT; i += NUM_CONSUMERS) {
    const uint32_t row = i / padding, chunk = head_dim / 8 + i % padding, in_tile = row % KV_ROWS;
    char* tile = shared().stages + row / KV_ROWS * Buffers::TILE_BYTES;
    *reinterpret_cast<uint4*>(tile + Buffers::offset(in_tile, chunk, in_tile % 8)) = zero_chunk();
  }
}

}  // namespace wide
}  // namespace distmk
