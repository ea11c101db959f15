// GGUF's Q4_K: nibbles, with a scale and a minimum of six bits for 32 columns (distmk/formats/q4_k.py).
#pragma once
#include "device/formats/gguf_codes.cuh"

namespace distmk {
namespace linear {

// A super-block is a row of a tile. Its sections are eight scales, eight minima, and their float16 scales, from `begin`
// on.
template <class F, uint32_t N_TILES, class Decode>
DISTMK_FN void multiply_super_blocks(const PackedTile<F>& tile, uint32_t begin, const FragmentB<N_TILES>& x,
                                     const GroupSums<N_TILES>& negated, const Decode& decode,
                                     MTileAccumulators<N_TILES>& acc) {
  const uint4 scales = tile.template scales<uint4>(begin);  // of row g, then of row g + 8
  const uint2 halves = tile.template scales<uint2>(begin + 2 * M_TILE * GROUPS);
  MTileAccumulators<N_TILES> products = {}, minima = {};
  multiply_groups(
      tile, x, decode,
      [&](uint32_t group, bool lower) { return byte_at(word_of(scales, (lower ? 2 : 0) + group / 4), group % 4); },
      products);
  add_scaled<N_TILES>(products, half_to_float(halves.x), half_to_float(halves.y), acc);
  // Minima are integers below 64: subnormal numbers, as codes are.
  const uint32_t upper = tile.pair_of_bytes(begin + M_TILE * GROUPS, false),
                 lower = tile.pair_of_bytes(begin + M_TILE * GROUPS, true);
  negated.multiply_minima(normal(upper), normal(lower), minima);
  add_scaled<N_TILES>(minima, half_to_float(halves.x >> 16), half_to_float(halves.y >> 16), acc);
}

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

  DISTMK_FN static void decode(uint32_t word, uint32_t (&pairs)[4]) {
    pairs[0] = normal(word & 0x000f000fu);
    pairs[1] = normal(word & 0x00f000f0u);
    pairs[2] = normal(word >> 8 & 0x000f000fu);
    pairs[3] = normal(word >> 8 & 0x00f000f0u);
  }

  template <uint32_t N_TILES>
  DISTMK_FN static void multiply(const PackedTile<Q4_KTiles>& tile, const FragmentB<N_TILES>& x,
                                 const Prepared<N_TILES>& negated, MTileAccumulators<N_TILES>& acc) {
    multiply_super_blocks(
        tile, 0, x, negated, [](uint32_t, uint32_t word, uint32_t (&pairs)[4], bool) { decode(word, pairs); }, acc);
  }
};

}  // namespace linear
}  // namespace distmk
