// GGUF's Q4_K: nibbles, with a scale and a minimum of six bits for 32 columns (distmk/formats/q4_k.py).
#pragma once
#include "device/formats/gguf_rows.cuh"

namespace distmk {
namespace linear {

struct Q4_KTiles {
  using Constants = Q4_KFormat;
  static constexpr int EVEN_POWER = power_for(133), ODD_POWER = EVEN_POWER - 4;  // codes of b1 are 16 times as large
  static constexpr bool TAKES_HALVES = false;

  template <uint32_t N_TILES>
  using Prepared = GroupSums<N_TILES>;
  template <uint32_t N_TILES>
  DISTMK_FN static void prepare(const FragmentB<N_TILES>& x, Prepared<N_TILES>& negated) {
    negated.compute(x, 0xbf80bf80u, 0xc180c180u);  // -1, -16
  }

  template <uint32_t N_TILES>
  DISTMK_FN static void multiply(const PackedTile<Q4_KTiles>& tile, const FragmentB<N_TILES>& x,
                                 const Prepared<N_TILES>& negated, MTileAccumulators<N_TILES>& acc) {
    multiply_super_blocks(
        tile, 0, x, negated, [](uint32_t, uint32_t word, uint32_t (&pairs)[4], bool) { decode_nibbles(word, pairs); },
        acc);
  }

  using BlockRow = AffineBlockRow<NibbleBlock, SuperBlockScales, 0>;
};

}  // namespace linear
}  // namespace distmk
