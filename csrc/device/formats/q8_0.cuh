// GGUF's Q8_0: signed bytes, with a float16 scale for 32 columns (distmk/formats/q8_0.py).
#pragma once
#include "device/formats/gguf_rows.cuh"

namespace distmk {
namespace linear {

struct Q8_0Tiles {
  using Constants = Q8_0Format;
  static constexpr int EVEN_POWER = EXACT_POWER, ODD_POWER = EXACT_POWER;
  static constexpr bool TAKES_HALVES = false;

  template <uint32_t N_TILES>
  struct Prepared {};
  template <uint32_t N_TILES>
  DISTMK_FN static void prepare(const FragmentB<N_TILES>&, Prepared<N_TILES>&) {}

  // The low bytes of both halves, in two's complement: 128 + the low seven bits, minus 128 or, with the sign, 256.
  DISTMK_FN static uint32_t decode(uint32_t bytes) {
    return add_pairs((bytes & 0x007f007fu) | 0x43004300u, (bytes & 0x00800080u) | 0xc300c300u);
  }

  template <uint32_t N_TILES>
  DISTMK_FN static void multiply(const PackedTile<Q8_0Tiles>& tile, const FragmentB<N_TILES>& x,
                                 const Prepared<N_TILES>&, MTileAccumulators<N_TILES>& acc) {
#pragma unroll
    for (uint32_t unit = 0; unit < 4; ++unit) {
      const uint4 upper = tile.unit(false, unit), lower = tile.unit(true, unit);
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t group = 2 * unit + i;
        MTileAccumulators<N_TILES> sums = {};
#pragma unroll
        for (uint32_t step = 0; step < 2; ++step) {
          const uint32_t above = word_of(upper, 2 * i + step), below = word_of(lower, 2 * i + step);
          const uint32_t a[4] = {decode(above), decode(below), decode(above >> 8), decode(below >> 8)};
          multiply_step<N_TILES>(a, x, 2 * group + step, sums);
        }
        add_scaled<N_TILES>(sums, half_scale(tile, 0, group, false), half_scale(tile, 0, group, true), acc);
      }
    }
  }

  struct BlockRow {
    uint4 words;
    HalfNumbers scales;

    BlockRow() = default;
    DISTMK_FN BlockRow(const TileRow<Q8_0Tiles>& row, uint32_t block)
        : words(row.codes<uint4>(block)), scales(row, 0, block) {}
    DISTMK_FN uint4 decode(uint32_t half) const {
      const SplitScale scale(scales.of(half));
      return four_pairs(
          [&](uint32_t i) { return scale.times(Q8_0Tiles::decode(word_of(words, 2 * half + i / 2) >> i % 2 * 8)); });
    }
  };
};

}  // namespace linear
}  // namespace distmk
