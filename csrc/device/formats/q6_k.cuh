// GGUF's Q6_K: codes of six bits around 32, with a scale of eight bits for 16 columns (distmk/formats/q6_k.py).
#pragma once
#include "device/formats/gguf_codes.cuh"

namespace distmk {
namespace linear {

struct Q6_KTiles {
  using Constants = Q6_KFormat;
  static constexpr int EVEN_POWER = EXACT_POWER, ODD_POWER = EXACT_POWER;
  static constexpr bool TAKES_HALVES = true;

  template <uint32_t N_TILES>
  struct Prepared {};
  template <uint32_t N_TILES>
  DISTMK_FN static void prepare(const FragmentB<N_TILES>&, Prepared<N_TILES>&) {}

  template <uint32_t N_TILES>
  DISTMK_FN static void multiply(const PackedTile<Q6_KTiles>& tile, const FragmentB<N_TILES>& x,
                                 const Prepared<N_TILES>&, MTileAccumulators<N_TILES>& acc) {
    MTileAccumulators<N_TILES> products = {};
#pragma unroll
    for (uint32_t word = 0; word < 4; ++word) {  // of high bits, and of scales, which each step loads anew
#pragma unroll
      for (uint32_t step = 0; step < 4; ++step) {
        const uint32_t nibbles = 2 * word + step / 2, pair = step % 2 * 2;
        const uint32_t upper_high = tile.word(false, 2, word), lower_high = tile.word(true, 2, word);
        const uint32_t upper = tile.word(false, nibbles / 4, nibbles % 4),
                       lower = tile.word(true, nibbles / 4, nibbles % 4);
        const uint32_t a[4] = {decode(upper, pair, upper_high, 2 * step), decode(lower, pair, lower_high, 2 * step),
                               decode(upper, pair + 1, upper_high, 2 * step + 1),
                               decode(lower, pair + 1, lower_high, 2 * step + 1)};
        MTileAccumulators<N_TILES> sums = {};
        multiply_step<N_TILES>(a, x, 4 * word + step, sums);
        add_scaled<N_TILES>(sums, scale(tile.word_of_row(0, false, word), step),
                            scale(tile.word_of_row(0, true, word), step), products);
      }
    }
    const uint32_t halves = tile.scales<uint32_t>(M_TILE * 2 * GROUPS);  // of row g, then of row g + 8
    add_scaled<N_TILES>(products, half_to_float(halves), half_to_float(halves >> 16), acc);
  }

 private:
  DISTMK_FN static uint32_t decode(uint32_t nibbles, uint32_t pair, uint32_t high, uint32_t index) {
    return signed_pair(pair_of_codes<2>(nibbles, pair, high, index), 32);
  }
  DISTMK_FN static float scale(uint32_t scales, uint32_t i) { return byte_at(scales ^ 0x80808080u, i, 128.0f); }
};

}  // namespace linear
}  // namespace distmk
