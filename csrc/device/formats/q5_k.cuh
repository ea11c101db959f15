// GGUF's Q5_K: codes of five bits, with a scale and a minimum of six bits for 32 columns (distmk/formats/q5_k.py).
#pragma once
#include "device/formats/gguf_rows.cuh"

namespace distmk {
namespace linear {

struct Q5_KTiles {
  using Constants = Q5_KFormat;
  static constexpr int EVEN_POWER = power_for(133), ODD_POWER = EVEN_POWER;
  static constexpr bool TAKES_HALVES = false;

  template <uint32_t N_TILES>
  using Prepared = GroupSums<N_TILES>;
  template <uint32_t N_TILES>
  DISTMK_FN static void prepare(const FragmentB<N_TILES>& x, Prepared<N_TILES>& negated) {
    negated.compute(x, 0xbf80bf80u, 0xbf80bf80u);  // -1
  }
  template <uint32_t N_TILES>
  DISTMK_FN static void multiply(const PackedTile<Q5_KTiles>& tile, const FragmentB<N_TILES>& x,
                                 const Prepared<N_TILES>& negated, MTileAccumulators<N_TILES>& acc) {
    const FifthBits bits(tile);
    const auto decode = [&](uint32_t group, uint32_t word, uint32_t (&pairs)[4], bool lower) {
      bits.decode(group, word, pairs, lower);
      for (uint32_t& pair : pairs) pair = normal(pair);
    };
    multiply_super_blocks(tile, FifthBits::BYTES, x, negated, decode, acc);
  }

  using BlockRow = AffineBlockRow<FifthBitBlock, SuperBlockScales, FifthBits::BYTES>;
};

}  // namespace linear
}  // namespace distmk
