// GGUF's Q6_K: codes of six bits around 32, with a scale of eight bits for 16 columns (distmk/formats/q6_k.py).
#pragma once
#include "device/formats/gguf_rows.cuh"

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

  // A word has the high bits of a block, and a word the scales of its 16 columns each.
  struct BlockRow {
    NibbleBlock low;
    uint32_t high, scales, unit;

    BlockRow() = default;
    DISTMK_FN BlockRow(const TileRow<Q6_KTiles>& row, uint32_t block)
        : low(row, block),
          high(row.codes<uint32_t>(2, 4 * block)),
          scales(row.scales<uint32_t, 2 * GROUPS>(0, 4 * block)),
          unit(row.scales<uint16_t, 2>(M_TILE * 2 * GROUPS, 0)) {}
    DISTMK_FN uint4 decode(uint32_t half) const {
      const uint32_t of_half = scales >> 16 * half;
      const SplitScale first(half_to_float(unit) * scale(of_half, 0)), second(half_to_float(unit) * scale(of_half, 1));
      return in_order(four_pairs([&](uint32_t i) {
        const uint32_t codes = Q6_KTiles::decode(low.word(half), i, high, 4 * half + i);
        return i < 2 ? first.times(codes) : second.times(codes);
      }));
    }

   private:
    // The lane's weights are those of order_in_halves(): lanes t and t + 2 exchange halves of theirs.
    DISTMK_FN static uint4 in_order(const uint4& pairs) {
      const bool upper = threadIdx.x % 4 < 2;
      const uint32_t first = __shfl_xor_sync(~0u, upper ? pairs.z : pairs.x, 2),
                     second = __shfl_xor_sync(~0u, upper ? pairs.w : pairs.y, 2);
      return upper ? uint4{pairs.x, pairs.y, first, second} : uint4{first, second, pairs.z, pairs.w};
    }
  };

 private:
  DISTMK_FN static uint32_t decode(uint32_t nibbles, uint32_t pair, uint32_t high, uint32_t index) {
    return signed_pair(pair_of_codes<2>(nibbles, pair, high, index), 32);
  }
  DISTMK_FN static float scale(uint32_t scales, uint32_t i) { return byte_at(scales ^ 0x80808080u, i, 128.0f); }
};

}  // namespace linear
}  // namespace distmk
