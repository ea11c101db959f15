// GGUF's Q4_1: nibbles, with a scale and a minimum in float16 for 32 columns (distmk/formats/q4_1.py).
#pragma once
#include "device/formats/gguf_rows.cuh"

namespace distmk {
namespace linear {

struct Q4_1Tiles {
  using Constants = Q4_1Format;
  static constexpr int EVEN_POWER = power_for(133), ODD_POWER = EVEN_POWER - 4;
  static constexpr bool TAKES_HALVES = false;

  template <uint32_t N_TILES>
  using Prepared = GroupSums<N_TILES>;
  template <uint32_t N_TILES>
  DISTMK_FN static void prepare(const FragmentB<N_TILES>& x, Prepared<N_TILES>& sums) {
    sums.compute(x, normal(0x00010001u), normal(0x00100010u));  // in units of values, as products are
  }

  template <uint32_t N_TILES>
  DISTMK_FN static void multiply(const PackedTile<Q4_1Tiles>& tile, const FragmentB<N_TILES>& x,
                                 const Prepared<N_TILES>& sums, MTileAccumulators<N_TILES>& acc) {
    const auto decode = [](uint32_t, uint32_t word, uint32_t (&pairs)[4], bool) { decode_nibbles(word, pairs); };
    multiply_scaled_groups(tile, 0, x, decode, acc);
    multiply_half_minima(tile, 2 * M_TILE * GROUPS, sums, acc);
  }

  using BlockRow = AffineBlockRow<NibbleBlock, HalfScales, 0>;
};

}  // namespace linear
}  // namespace distmk
