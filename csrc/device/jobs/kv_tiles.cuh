// KV tiles of block jobs (attention_block.cuh): where they lie in shared memory, and how all consumers copy them from
// the paged cache.
#pragma once
#include "device/core/bf16.cuh"
#include "device/jobs/attention_plan.cuh"

namespace distmk {
namespace jobs {

// The buffers of KV tiles: COUNT buffers of keys and COUNT of values. DIM: head_dim rounded up to a size that the loops
// over a head support; elements behind head_dim are zero. One copy brings the keys of a tile and the values of the tile
// LAG before it, and copies run up to AHEAD tiles ahead. With few buffers LAG is 1, because key buffers are free
// earlier than value buffers.
template <uint32_t DIM>
struct KvBuffers {
  static constexpr uint32_t COUNT = DIM <= MAX_HEAD_DIM / 2 ? 4 : 2, LAG = COUNT == 2, AHEAD = COUNT - 1 + LAG;
  static constexpr uint32_t ROW_BYTES = 64 * sizeof(__nv_bfloat16), SLOT_BYTES = KV_ROWS * ROW_BYTES,
                            TILE_BYTES = DIM / 64 * SLOT_BYTES, CHUNKS = DIM / 8, WARP_ROWS = KV_ROWS / NUM_WARPS,
                            ROWS_PER_PASS = 32 / CHUNKS, BYTES = 2 * COUNT * TILE_BYTES;
  static_assert(WARP_ROWS == 8, "a warp's rows are in one page where the caches are swizzled");

  DISTMK_FN static uint32_t k(uint32_t tile) {
    return shared_address(shared().at<Overlay::KV_BUFFERS>()) + tile % COUNT * 2 * TILE_BYTES;
  }
  DISTMK_FN static uint32_t v(uint32_t tile) { return k(tile) + TILE_BYTES; }
  // Offset of a chunk of a tile's row. A tile is in slots of 64 columns, in which the chunks of a row are permuted.
  DISTMK_FN static uint32_t offset(uint32_t row, uint32_t chunk, uint32_t swizzle) {
    return chunk / 8 * SLOT_BYTES + row * ROW_BYTES + (chunk % 8 ^ swizzle) * 16;
  }
};

#ifdef DISTMK_EMULATED
constexpr uint32_t PART_PAGES = 128;  // few, so that tests have jobs of many parts
#else
constexpr uint32_t PART_PAGES = 1024;
#endif
static_assert(PART_PAGES >= 2 * KV_ROWS, "a part has two tiles, however small pages are");

// For each page of a job's positions, the cache row at which the page begins for the job's KV head. There is room for
// the pages of two parts of a job, which alternate. When the second tile of a part is copied, the next part is looked
// up.
class PageRows {
 public:
  static_assert(2 * PART_PAGES * sizeof(uint32_t) <= overlay_bytes(Overlay::PAGES), "");
  const uint32_t num_keys;  // positions of the job

  DISTMK_FN explicit PageRows(uint32_t keys) : num_keys(keys) {}
  // All consumers call this and the next function. The rows may be read after the next barrier.
  DISTMK_FN void look_up() const {
    look_up(0);
    look_up(1);
  }
  // Called before this thread copies `tile`, while other threads copy that tile or the one before it.
  DISTMK_FN void look_up_ahead(uint32_t tile) const {
    const uint32_t part_tiles = PART_PAGES * attention_plan().args.page_size / KV_ROWS;
    if ((tile & (part_tiles - 1)) == 1 && tile > part_tiles) look_up((tile >> floor_log2(part_tiles)) + 1);
  }
  // Cache row of a position of the job.
  DISTMK_FN uint32_t row(uint32_t position) const {
    const uint32_t page_size = attention_plan().args.page_size, at = attention_plan().job.first_position + position;
    return rows()[((at >> floor_log2(page_size)) - first_page()) % (2 * PART_PAGES)] + (at & (page_size - 1));
  }

 private:
  DISTMK_FN static uint32_t* rows() { return shared().at<Overlay::PAGES, uint32_t>(); }
  DISTMK_FN static uint32_t first_page() {
    return attention_plan().job.first_position >> floor_log2(attention_plan().args.page_size);
  }
  DISTMK_FN void look_up(uint32_t part) const {
    const AttentionJobsArgs& args = attention_plan().args;
    const AttentionJob& job = attention_plan().job;
    const uint32_t last = (job.first_position + num_keys - 1) >> floor_log2(args.page_size);
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < PART_PAGES; i += NUM_CONSUMERS) {
      const uint32_t in_job = part * PART_PAGES + i, page = first_page() + in_job;
      if (page > last) return;
      rows()[in_job % (2 * PART_PAGES)] =
          cache_row(at_operand<int32_t>(args.page_table), args, static_cast<uint32_t>(job.run.slot), job.kv_head,
                    page << floor_log2(args.page_size));
    }
  }
};

// A warp's copies: some rows of each KV tile, one 16-byte chunk per lane. In shared memory, chunk c of row r is stored
// as chunk c ^ r % 8, so that ldmatrix has no bank conflicts. The caches have another swizzle. Values derived from the
// arguments are computed where they are used, because no registers are left to keep them in.
template <uint32_t DIM>
class KvLoader {
 public:
  using Buffers = KvBuffers<DIM>;
  const PageRows pages;

  DISTMK_FN explicit KvLoader(uint32_t num_keys) : pages(num_keys) {}
  // Copies the keys of `tile` and the values of the tile LAG before it, whose pages have been looked up. Positions from
  // num_keys on, and all of tile -1, become zeros, because a weight of 0 times NaN would be NaN.
  DISTMK_FN void copy(uint32_t tile) const {
    const AttentionJobsArgs& args = attention_plan().args;
    if (tile * KV_ROWS < pages.num_keys + Buffers::LAG * KV_ROWS) {
      if (args.head_dim == DIM && swizzles_cache(DIM, args.page_size)) {
        copy_of_page(args.k_cache, tile, Buffers::k(tile));
        copy_of_page(args.v_cache, tile - Buffers::LAG, Buffers::v(tile - Buffers::LAG));
      } else if (8 * chunk() < args.head_dim) {
        copy_rows(args.k_cache, tile, Buffers::k(tile));
        copy_rows(args.v_cache, tile - Buffers::LAG, Buffers::v(tile - Buffers::LAG));
      }
    }
    commit_copies();
  }

 private:
  DISTMK_FN static uint32_t chunk() { return opaque(threadIdx.x) % Buffers::CHUNKS; }
  // This lane's first row of the tile.
  DISTMK_FN static uint32_t first_row() {
    return opaque(threadIdx.x) / 32 * Buffers::WARP_ROWS + opaque(threadIdx.x) % 32 / Buffers::CHUNKS;
  }
  // Copies to `to`. All of the warp's rows are in one page and are swizzled there.
  DISTMK_FN void copy_of_page(uint64_t cache, uint32_t tile, uint32_t to) const {
    const uint32_t position = tile * KV_ROWS + first_row();
    const auto* from = at_operand<__nv_bfloat16>(cache) + uint64_t{pages.row(position)} * DIM + 8 * chunk();
    to += Buffers::offset(first_row(), chunk(), first_row() % 2 * 4);
#pragma unroll
    for (uint32_t i = 0; i < Buffers::WARP_ROWS; i += Buffers::ROWS_PER_PASS)
      copy_chunk((to ^ i % 2 * 64) + i * Buffers::ROW_BYTES, from + i * DIM, position + i < pages.num_keys);
  }
  DISTMK_FN void copy_rows(uint64_t cache, uint32_t tile, uint32_t to) const {
    const AttentionJobsArgs& args = attention_plan().args;
    const bool is_swizzled = swizzles_cache(args.head_dim, args.page_size);
#pragma unroll 1
    for (uint32_t i = 0; i < Buffers::WARP_ROWS; i += Buffers::ROWS_PER_PASS) {
      const uint32_t row = first_row() + i, position = tile * KV_ROWS + row;
      const auto* from = at_operand<__nv_bfloat16>(cache) + uint64_t{pages.row(position)} * args.head_dim;
      copy_chunk(to + Buffers::offset(row, chunk(), is_swizzled ? row % 2 * 4 : row % 8), from + 8 * chunk(),
                 position < pages.num_keys);
    }
  }
};

// Zeroes the chunks behind head_dim in all buffers.
template <uint32_t DIM>
DISTMK_FN void zero_padding(uint32_t head_dim) {
  using Buffers = KvBuffers<DIM>;
  const uint32_t padding = (DIM - head_dim) / 8;
  for (uint32_t i = threadIdx.x; i < padding * KV_ROWS * 2 * Buffers::COUNT; i += NUM_CONSUMERS) {
    const uint32_t row = i / padding, chunk = head_dim / 8 + i % padding, in_tile = row % KV_ROWS;
    char* tile = shared().at<Overlay::KV_BUFFERS>() + row / KV_ROWS * Buffers::TILE_BYTES;
    *reinterpret_cast<uint4*>(tile + Buffers::offset(in_tile, chunk, in_tile % 8)) = zero_chunk();
  }
}

}  // namespace jobs
}  // namespace distmk
