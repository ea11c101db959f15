// Integers of four bits in groups of 128 columns, each with a float16 scale and a zero point (distmk/formats/int4.py).
//   sum over a group of (code - zero) * scale * x = scale * (sum of code * x - zero * sum of x)
// The products of a group begin at -zero * sum of x, so a zero point costs nothing per element.
#pragma once
#include "device/formats/gguf_rows.cuh"

namespace distmk {
namespace linear {

struct Int4Tiles {
  using Constants = Int4Format;
  static_assert(Constants::GROUP_COLS * 2 == K_TILE, "two groups in a tile");
  static constexpr uint32_t SCALES_BYTES = M_TILE * 2 * 2;                       // zero points are behind them
  static constexpr int EVEN_POWER = power_for(133), ODD_POWER = EVEN_POWER - 4;  // codes of b1 are 16 times as large
  static constexpr bool TAKES_HALVES = false;

  // -(sum of a group's activations) * 2^23, of tokens 2 t and 2 t + 1 of each N tile, in units of the products.
  template <uint32_t N_TILES>
  struct Prepared {
    float sums[N_TILES][2][2];
  };

  template <uint32_t N_TILES>
  DISTMK_FN static void prepare(const FragmentB<N_TILES>& x, Prepared<N_TILES>& prepared) {
    constexpr uint32_t SIGNS = 0x80008000u, first = SIGNS | pair_of_powers(NORMAL_SHIFT - 110),
                       second = SIGNS | pair_of_powers(NORMAL_SHIFT - 106);
    const uint32_t a[4] = {first, first, second, second};
#pragma unroll
    for (uint32_t group = 0; group < 2; ++group) {
      MTileAccumulators<N_TILES> even = {}, odd = {};
#pragma unroll
      for (uint32_t step = 0; step < 8; ++step) multiply_step<N_TILES>(a, x, 8 * group + step, step % 2 ? odd : even);
#pragma unroll
      for (uint32_t n = 0; n < N_TILES; ++n)
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) prepared.sums[n][group][i] = even[n][i] + odd[n][i];  // all rows are alike
    }
  }

  // A word has the registers b0 and b1 of two steps.
  DISTMK_FN static void decode(uint32_t word, uint32_t& b0, uint32_t& b1, uint32_t& next_b0, uint32_t& next_b1) {
    const uint32_t high = word >> 8;
    b0 = normal(word & 0x000f000fu);
    b1 = normal(word & 0x00f000f0u);
    next_b0 = normal(high & 0x000f000fu);
    next_b1 = normal(high & 0x00f000f0u);
  }

  template <uint32_t N_TILES>
  DISTMK_FN static void multiply(const PackedTile<Int4Tiles>& tile, const FragmentB<N_TILES>& x,
                                 const Prepared<N_TILES>& prepared, MTileAccumulators<N_TILES>& acc) {
    const uint2 scales = tile.scales<uint2>(0);                  // both groups of row g, then of row g + 8
    const uint32_t zeros = tile.scales<uint32_t>(SCALES_BYTES);  // in the same order
#pragma unroll
    for (uint32_t group = 0; group < 2; ++group) {
      const float upper_zero = zero_at(zeros, 8 * group), lower_zero = zero_at(zeros, 16 + 8 * group);
      MTileAccumulators<N_TILES> sums;
#pragma unroll
      for (uint32_t n = 0; n < N_TILES; ++n)
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i)
          sums[n][i] = (i < 2 ? upper_zero : lower_zero) * prepared.sums[n][group][i % 2];
      const uint4 upper = tile.unit(false, group), lower = tile.unit(true, group);
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        uint32_t a[2][4];
        decode(word_of(upper, i), a[0][0], a[0][2], a[1][0], a[1][2]);
        decode(word_of(lower, i), a[0][1], a[0][3], a[1][1], a[1][3]);
#pragma unroll
        for (uint32_t step = 0; step < 2; ++step) multiply_step<N_TILES>(a[step], x, 8 * group + 2 * i + step, sums);
      }
      add_scaled<N_TILES>(sums, half_to_float(scales.x >> 16 * group), half_to_float(scales.y >> 16 * group), acc);
    }
  }

  struct BlockRow {
    NibbleBlock codes;
    uint32_t zero;
    SplitScale scale;

    BlockRow() = default;
    DISTMK_FN BlockRow(const TileRow<Int4Tiles>& row, uint32_t block)
        : codes(row, block),
          zero(row.scales<uint8_t, 2>(SCALES_BYTES, block / 2)),
          scale(half_to_float(row.scales<uint16_t, 4>(0, block / 2 * 2))) {}
    DISTMK_FN uint4 decode(uint32_t half) const {
      return four_pairs([&](uint32_t i) { return scale.times(signed_pair(codes.pair(half, i), zero)); });
    }
  };

 private:
  // The byte at `bit`, times 2^-23.
  DISTMK_FN static float zero_at(uint32_t zeros, uint32_t bit) {
    return __uint_as_float(0x3f800000u | (zeros >> bit & 0xff)) - 1.0f;
  }
};

}  // namespace linear
}  // namespace distmk
