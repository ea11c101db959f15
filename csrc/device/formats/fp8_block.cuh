// FP8 with a scale per block of 128 x 128 elements (distmk/formats/fp8_block.py).
#pragma once
#include "device/formats/e4m3.cuh"

namespace distmk {
namespace linear {

struct Fp8BlockTiles : E4m3Codes {
  using Constants = Fp8BlockFormat;
  static_assert(Constants::GROUP_COLS * 2 == K_TILE, "two groups in a tile");

  template <uint32_t N_TILES>
  DISTMK_FN static void multiply(const PackedTile<Fp8BlockTiles>& tile, const FragmentB<N_TILES>& x,
                                 const Prepared<N_TILES>&, MTileAccumulators<N_TILES>& acc) {
    const float4 scales = tile.scales<float4>(0);  // both groups of row g, then of row g + 8
    MTileAccumulators<N_TILES> first = {}, second = {};
    multiply_units(tile, 0, 2, x, first);
    multiply_units(tile, 2, 4, x, second);
    add_scaled<N_TILES>(first, scales.x, scales.z, acc);
    add_scaled<N_TILES>(second, scales.y, scales.w, acc);
  }

  struct BlockRow {
    CodeBlock codes;
    SplitScale scale;

    BlockRow() = default;
    DISTMK_FN BlockRow(const TileRow<Fp8BlockTiles>& row, uint32_t block)
        : codes(row, block), scale(row.scales<float, 2 * sizeof(float)>(0, block / 2 * sizeof(float))) {}
    DISTMK_FN uint4 decode(uint32_t half) const {
      const uint4 pairs = codes.decode(half);
      return {scale.times(pairs.x), scale.times(pairs.y), scale.times(pairs.z), scale.times(pairs.w)};
    }
  };
};

}  // namespace linear
}  // namespace distmk
