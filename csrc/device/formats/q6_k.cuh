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
    const RowPair scales = tile.scales<RowPair>(0);
    const uint32_t halves = tile.scales<uint32_t>(M_TILE * 2 * GROUPS);  // of row g, then of row g + 8
    const uint4 upper_high = tile.unit(false, 2), lower_high = tile.unit(true, 2);
    MTileAccumulators<N_TILES> products = {};
#pragma unroll
    for (uint32_t unit = 0; unit < 2; ++unit) {
      const uint4 upper = tile.unit(false, unit), lower = tile.unit(true, unit);
#pragma unroll
      for (uint32_t step = 0; step < 8; ++step) {
        const uint32_t number = 8 * unit + step, word = number / 4, pair = 2 * (step % 2), index = number % 4 * 2;
        const uint32_t above = word_of(upper, step / 2), below = word_of(lower, step / 2);
        const uint32_t a[4] = {
            decode(above, pair, word_of(upper_high, word), index),
            decode(below, pair, word_of(lower_high, word), index),
            decode(above, pair + 1, word_of(upper_high, word), index + 1),
            decode(below, pair + 1, word_of(lower_high, word), index + 1),
        };
        MTileAccumulators<N_TILES> sums = {};
        multiply_step<N_TILES>(a, x, number, sums);
        add_scaled<N_TILES>(sums, scale(scales.upper, number), scale(scales.lower, number), products);
      }
    }
    add_scaled<N_TILES>(products, half_to_float(halves), half_to_float(halves >> 16), acc);
  }

 private:
  DISTMK_FN static uint32_t decode(uint32_t nibbles, uint32_t pair, uint32_t high, uint32_t index) {
    return signed_pair(pair_of_codes<2>(nibbles, pair, high, index), 32);
  }
  DISTMK_FN static float scale(const uint4& scales, uint32_t number) {
    return byte_at(word_of(scales, number / 4) ^ 0x80808080u, number % 4, 128.0f);
  }
};

}  // namespace linear
}  // namespace distmk
