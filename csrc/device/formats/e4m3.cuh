// E4M3 codes in packed tiles (distmk/formats/e4m3.py). As bf16 a code in its place is its value times 2^-120, subnormal
// codes too.
#pragma once
#include "device/formats/block_row.cuh"

namespace distmk {
namespace linear {

struct E4m3Codes {
  static constexpr int EVEN_POWER = power_for(120), ODD_POWER = EVEN_POWER;
  static constexpr bool TAKES_HALVES = false;

  template <uint32_t N_TILES>
  struct Prepared {};
  template <uint32_t N_TILES>
  DISTMK_FN static void prepare(const FragmentB<N_TILES>&, Prepared<N_TILES>&) {}

  // The registers of b0 and b1 in a word. A half has the first one's code in place, and the second one's in the gaps.
  DISTMK_FN static void decode(uint32_t word, uint32_t& first, uint32_t& second) {
    first = normal(word & 0x87f087f0u);
    second = normal((word << 4 & 0x80f080f0u) | (word >> 4 & 0x07000700u));
  }

  // A block of codes: a word has two pairs.
  struct CodeBlock {
    uint4 words;

    CodeBlock() = default;
    template <class F>
    DISTMK_FN CodeBlock(const TileRow<F>& row, uint32_t block) : words(row.template codes<uint4>(block)) {}
    DISTMK_FN uint4 decode(uint32_t half) const {
      uint4 pairs;
      E4m3Codes::decode(word_of(words, 2 * half), pairs.x, pairs.y);
      E4m3Codes::decode(word_of(words, 2 * half + 1), pairs.z, pairs.w);
      return {value(pairs.x), value(pairs.y), value(pairs.z), value(pairs.w)};
    }

   private:
    DISTMK_FN static uint32_t value(uint32_t pair) { return multiply_pairs(pair, pair_of_powers(120 - NORMAL_SHIFT)); }
  };

  // sums += the products of units [begin, end).
  template <class F, uint32_t N_TILES>
  DISTMK_FN static void multiply_units(const PackedTile<F>& tile, uint32_t begin, uint32_t end,
                                       const FragmentB<N_TILES>& x, MTileAccumulators<N_TILES>& sums) {
#pragma unroll
    for (uint32_t unit = begin; unit < end; ++unit) {
      const uint4 upper = tile.unit(false, unit), lower = tile.unit(true, unit);
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        uint32_t a[4];
        decode(word_of(upper, i), a[0], a[2]);
        decode(word_of(lower, i), a[1], a[3]);
        multiply_step<N_TILES>(a, x, 4 * unit + i, sums);
      }
    }
  }
};

}  // namespace linear
}  // namespace distmk
