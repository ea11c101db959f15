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
};

}  // namespace linear
}  // namespace distmk
