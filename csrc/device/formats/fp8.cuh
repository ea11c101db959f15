// FP8 with a scale per row, which the epilogue multiplies sums by (distmk/formats/fp8.py).
#pragma once
#include "device/formats/e4m3.cuh"

namespace distmk {
namespace linear {

struct Fp8Tiles : E4m3Codes {
  using Constants = Fp8Format;

  template <uint32_t N_TILES>
  DISTMK_FN static void multiply(const PackedTile<Fp8Tiles>& tile, const FragmentB<N_TILES>& x,
                                 const Prepared<N_TILES>&, MTileAccumulators<N_TILES>& acc) {
    if constexpr (N_TILES > 1) return multiply_units(tile, 0, 4, x, acc);
    MTileAccumulators<N_TILES> second = {};  // two chains of products, because an mma waits for the one before it
    multiply_units(tile, 0, 2, x, acc);
    multiply_units(tile, 2, 4, x, second);
    add_accumulators<N_TILES>(second, acc);
  }

  using BlockRow = CodeBlock;
};

}  // namespace linear
}  // namespace distmk
