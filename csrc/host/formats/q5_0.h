// Blocks of GGUF's Q5_0 (distmk/formats/q5_0.py).
#pragma once
#include "host/formats/gguf.h"

namespace distmk {

struct Q5_0Block {  // d, fifth bits, then codes
  static constexpr uint32_t BYTES = 22, GROUP = 32;
  static constexpr bool HAS_OFFSETS = false;
  DISTMK_INLINE static Group<GROUP> load(const uint8_t* block, uint32_t) {
    Group<GROUP> group;
    group.scale = half_at(block, 0);
    uint32_t high;
    memcpy(&high, block + 2, sizeof high);
    load_nibbles(block + 6, group,
                 [&](simd::Ints codes, uint32_t first) { return (codes | fifth_bits(high, first)) - 16; });
    return group;
  }
};

using Q5_0Rows = GgufRows<Q5_0Format, Q5_0Block>;

}  // namespace distmk
