// Where the M tiles of a GEMM in jobs lie in memory (distmk/formats/tiles.py, packed_tiles.py).
#pragma once
#include "device/formats/format_traits.cuh"
#include "device/jobs/rings.cuh"

namespace distmk {
namespace jobs {

// The bytes of tiles. A tile of packed rows begins with the scales of 16 rows; behind a slab's tiles are scales of its
// rows, if the format has some. Without packed weights all of it is known to the compiler.
struct TileShape {
#ifdef DISTMK_PACKED
  uint32_t row_bytes, scale_bytes;  // of K_TILE columns of a row; of a tile
  bool has_row_scales;

  template <class Count>
  DISTMK_FN Count code_bytes(Count elements) const {
    return elements * row_bytes / K_TILE;
  }
#else
  static constexpr uint32_t scale_bytes = 0;

  template <class Count>
  DISTMK_FN static Count code_bytes(Count elements) {
    return Weights::bytes(elements);
  }
#endif
};

#ifdef DISTMK_PACKED
DISTMK_FN TileShape shape_of(const LinearJobsArgs& args) {
  if (!is_packed(args)) return {Weights::bytes(K_TILE), 0, false};
  const linear::FormatTraits& traits = linear::traits_of(args.format);
  return {traits.stage.row_bytes, traits.stage.scale_bytes, traits.has_row_scales};
}

// Bytes of a slab's tiles, and of the whole slab.
DISTMK_FN uint64_t tiles_bytes(const TileShape& shape, uint32_t num_rows, uint32_t pitch) {
  const uint64_t num_m_tiles = (num_rows + M_TILE - 1) / M_TILE;
  return shape.code_bytes(uint64_t{num_rows} * pitch) + num_m_tiles * (pitch / K_TILE) * shape.scale_bytes;
}
DISTMK_FN uint64_t slab_bytes(const TileShape& shape, uint32_t num_rows, uint32_t pitch) {
  constexpr uint32_t ALIGNED = 4;  // rows whose scales take 16 bytes
  const uint32_t scaled_rows = shape.has_row_scales ? (num_rows + ALIGNED - 1) / ALIGNED * ALIGNED : 0;
  return tiles_bytes(shape, num_rows, pitch) + scaled_rows * sizeof(float);
}

// Bytes of the slabs before a slab of a part. The first may lack rows. The others are whole: reduced slabs, then slabs
// of two sizes, which differ by a pair of rows.
DISTMK_FN uint64_t bytes_before(const LinearJobsArgs& args, const TileShape& shape, uint32_t slab) {
  if (!slab) return 0;
  const auto bytes_of = [&](uint32_t num_rows) { return slab_bytes(shape, num_rows, args.k_pitch); };
  const uint32_t begin = args.first_slab + 1, end = args.first_slab + slab;
  const uint32_t first_other = min(max(begin, args.num_reduced), end);
  const uint32_t rows = slab_begin(args, end) - slab_begin(args, first_other);
  const uint32_t num_others = end - first_other, num_rows = num_pairs(args) / (args.num_slabs - args.num_reduced) * 2;
  const uint32_t num_larger = (rows - num_others * num_rows) / 2;
  return bytes_of(part_begin(args, 1)) + (first_other - begin) * bytes_of(args.reduced_rows) +
         (num_others - num_larger) * bytes_of(num_rows) + num_larger * bytes_of(num_rows + 2);
}
#else
DISTMK_FN TileShape shape_of(const LinearJobsArgs&) { return {}; }
#endif

// Address and size of an M tile's part in a K tile of the packed weights.
class TileSource {
 public:
  DISTMK_FN TileSource(const char* weight, const LinearJobsArgs& args, const TileRows& rows)
      : shape_(shape_of(args)),
        slab_(weight + slab_offset(args, rows)),
        pitch_(args.k_pitch),
        num_rows_(rows.count),
        block_first_(rows.first / M_BLOCK * M_BLOCK),
        block_rows_(rows.count ? min(M_BLOCK, rows.slab_rows - block_first_) : 0),
        row_in_block_(rows.first % M_BLOCK) {}

  DISTMK_FN uint32_t num_bytes(uint32_t k_tile) const {
    const uint32_t code_bytes = shape_.code_bytes(num_rows_ * min(K_TILE, pitch_ - k_tile * K_TILE));
    return code_bytes + (num_rows_ ? shape_.scale_bytes : 0);
  }
  DISTMK_FN const char* begin(uint32_t k_tile) const {
    const uint32_t k = k_tile * K_TILE, block_k = k / K_BLOCK * K_BLOCK, block_cols = min(K_BLOCK, pitch_ - block_k);
    const uint64_t elements = uint64_t{block_first_} * pitch_ + uint64_t{block_rows_} * block_k +
                              row_in_block_ * block_cols + num_rows_ * (k - block_k);
    return slab_ + shape_.code_bytes(elements) + uint64_t{tiles_before(k, block_k, block_cols)} * shape_.scale_bytes;
  }
  // Sets the scales of the rows of a job's M tile `tile`: `rows`, which this is the source of.
  DISTMK_FN void find_row_scales([[maybe_unused]] const TileRows& rows, [[maybe_unused]] uint32_t tile,
                                 [[maybe_unused]] RowScales& scales) const {
#ifdef DISTMK_PACKED
    const auto* of_slab = reinterpret_cast<const float*>(slab_ + tiles_bytes(shape_, rows.slab_rows, pitch_));
    scales.of_tile[tile] = shape_.has_row_scales ? of_slab + rows.first : nullptr;
#endif
  }

 private:
  TileShape shape_;
  const char* slab_;
  uint32_t pitch_, num_rows_;
  uint32_t block_first_, block_rows_, row_in_block_;  // the M block that holds the tile, and the tile's first row in it

  DISTMK_FN uint64_t slab_offset(const LinearJobsArgs& args, const TileRows& rows) const {
#ifdef DISTMK_PACKED
    if (is_packed(args)) return bytes_before(args, shape_, rows.slab);
#endif
    return Weights::bytes(uint64_t{rows.slab_begin} * args.k_pitch);
  }
  // Tiles of the slab that lie before the tile, in whole K tiles.
  DISTMK_FN uint32_t tiles_before(uint32_t k, uint32_t block_k, uint32_t block_cols) const {
    const uint32_t block_tiles = (block_rows_ + M_TILE - 1) / M_TILE;
    return (block_first_ / M_TILE * pitch_ + block_tiles * block_k + row_in_block_ / M_TILE * block_cols + k -
            block_k) /
           K_TILE;
  }
};

}  // namespace jobs
}  // namespace distmk
