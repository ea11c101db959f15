// GGUF's Q5_1: codes of five bits, with a scale and a minimum in float16 for 32 columns (distmk/formats/q5_1.py).
#pragma once
#include "device/formats/gguf_rows.cuh"

namespace distmk {
namespace linear {

struct Q5_1Tiles {
  using Constants = Q5_1Format;
  static constexpr int EVEN_POWER = power_for(133), ODD_POWER = EVEN_POWER;
  static constexpr bool TAKES_HALVES = false;

  template <uint32_t N_TILES>
  using Prepared = GroupSums<N_TILES>;
  template <uint32_t N_TILES>
  DISTMK_FN static void prepare(const FragmentB<N_TILES>& x, Prepared<N_TILES>& sums) {
    sums.compute(x, normal(0x00010001u), normal(0x00010001u));  // in units of values, as products are
  }

  template <uint32_t N_TILES>
  DISTMK_FN static void multiply(const PackedTile<Q5_1Tiles>& tile, const FragmentB<N_TILES>& x,
                                 const Prepared<N_TILES>& sums, MTileAccumulators<N_TILES>& acc) {
    const FifthBits bits(tile);
    const auto decode = [&](uint32_t group, uint32_t word, uint32_t (&pairs)[4], bool lower) {
      bits.decode(group, word, pairs, lower);
      for (uint32_t& pair : pairs) pair = normal(pair);
    };
    multiply_scaled_groups(tile, FifthBits::BYTES, x, decode, acc);
    multiply_half_minima(tile, FifthBits::BYTES + 2 * M_TILE * GROUPS, sums, acc);
  }

  using BlockRow = AffineBlockRow<FifthBitBlock, HalfScales, FifthBits::BYTES>;
};

}  // namespace linear
}  // namespace distmk
