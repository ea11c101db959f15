// GGUF's Q5_0: codes of five bits around 16, with a float16 scale for 32 columns (distmk/formats/q5_0.py).
#pragma once
#include "device/formats/gguf_rows.cuh"

namespace distmk {
namespace linear {

struct Q5_0Tiles {
  using Constants = Q5_0Format;
  static constexpr int EVEN_POWER = EXACT_POWER, ODD_POWER = EXACT_POWER;
  static constexpr bool TAKES_HALVES = false;

  template <uint32_t N_TILES>
  struct Prepared {};
  template <uint32_t N_TILES>
  DISTMK_FN static void prepare(const FragmentB<N_TILES>&, Prepared<N_TILES>&) {}

  template <uint32_t N_TILES>
  DISTMK_FN static void multiply(const PackedTile<Q5_0Tiles>& tile, const FragmentB<N_TILES>& x,
                                 const Prepared<N_TILES>&, MTileAccumulators<N_TILES>& acc) {
    const FifthBits bits(tile);
    const auto decode = [&](uint32_t group, uint32_t word, uint32_t (&pairs)[4], bool lower) {
      bits.decode(group, word, pairs, lower);
      for (uint32_t& pair : pairs) pair = signed_pair(pair, 16);
    };
    multiply_scaled_groups(tile, FifthBits::BYTES, x, decode, acc);
  }

  using BlockRow = SignedBlockRow<FifthBitBlock, 16, FifthBits::BYTES>;
};

}  // namespace linear
}  // namespace distmk
