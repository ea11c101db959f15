// Rows of FP8 E4M3 codes with float32 scales before them (distmk/formats/e4m3.py).
#pragma once
#include "host/formats/row_format.h"

namespace distmk {

// COLS_PER_SCALE: 0 for one scale a row.
template <uint32_t COLS_PER_SCALE>
struct E4m3Rows {
  static constexpr uint32_t GROUP = 32;
  static constexpr bool HAS_OFFSETS = false;
  static uint64_t codes_begin(uint32_t k) {
    return sizeof(float) * (COLS_PER_SCALE ? (uint64_t{k} + COLS_PER_SCALE - 1) / COLS_PER_SCALE : 1);
  }
  static uint64_t row_bytes(uint32_t k) { return codes_begin(k) + (uint64_t{k} + GROUP - 1) / GROUP * GROUP; }

  // A code's bits, moved to the places of sign, exponent and mantissa of a float16, are its value * 2^-8: the float16
  // has one bit of exponent more, and a bias of 15 instead of 7.
  DISTMK_INLINE static Group<GROUP> load(const uint8_t* row, uint32_t k, uint32_t index) {
    using namespace simd;
    const uint32_t scale = COLS_PER_SCALE ? index / (COLS_PER_SCALE / GROUP) : 0;
    const uint8_t* codes = row + codes_begin(k) + uint64_t{index} * GROUP;
    Group<GROUP> group;
    memcpy(&group.scale, row + scale * sizeof(float), sizeof(float));
    group.scale *= 256.0f;
#pragma GCC unroll 8
    for (uint32_t i = 0; i < Group<GROUP>::NUM_VECTORS; ++i) {
      // The sign is copied to the lower of the two bits that the shift leaves between it and the exponent.
      const Shorts wide = load_shorts(codes + i * LANES) << 8 >> 1;
      group.codes[i] = from_f16((Halves)(wide & static_cast<int16_t>(0xbf80)));
    }
    return group;
  }
};

}  // namespace distmk
