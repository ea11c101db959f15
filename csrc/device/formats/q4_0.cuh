// GGUF's Q4_0: nibbles around 8, with a float16 scale for 32 columns (distmk/formats/q4_0.py).
#pragma once
#include "device/formats/gguf_rows.cuh"

namespace distmk {
namespace linear {

struct Q4_0Tiles {
  using Constants = Q4_0Format;
  static constexpr int EVEN_POWER = EXACT_POWER, ODD_POWER = EXACT_POWER;
  static constexpr bool TAKES_HALVES = false;

  template <uint32_t N_TILES>
  struct Prepared {};
  template <uint32_t N_TILES>
  DISTMK_FN static void prepare(const FragmentB<N_TILES>&, Prepared<N_TILES>&) {}

  template <uint32_t N_TILES>
  DISTMK_FN static void multiply(const PackedTile<Q4_0Tiles>& tile, const FragmentB<N_TILES>& x,
                                 const Prepared<N_TILES>&, MTileAccumulators<N_TILES>& acc) {
    const auto decode = [](uint32_t, uint32_t word, uint32_t (&pairs)[4], bool) {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) pairs[i] = signed_pair(word >> 4 * i & 0x000f000fu, 8);
    };
    multiply_scaled_groups(tile, 0, x, decode, acc);
  }

  using BlockRow = SignedBlockRow<NibbleBlock, 8, 0>;
};

}  // namespace linear
}  // namespace distmk
