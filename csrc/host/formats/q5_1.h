// Blocks of GGUF's Q5_1 (distmk/formats/q5_1.py).
#pragma once
#include "host/formats/gguf.h"

namespace distmk {

struct Q5_1Block {  // d and m, fifth bits, then codes
  static constexpr uint32_t BYTES = 24, GROUP = 32;
  static constexpr bool HAS_OFFSETS = true;
  DISTMK_INLINE static Group<GROUP> load(const uint8_t* block, uint32_t) {
    Group<GROUP> group;
    group.scale = half_at(block, 0), group.offset = half_at(block, 2);
    uint32_t high;
    memcpy(&high, block + 4, sizeof high);
    load_nibbles(block + 8, group, [&](simd::Ints codes, uint32_t first) { return codes | fifth_bits(high, first); });
    return group;
  }
};

using Q5_1Rows = GgufRows<Q5_1Format, Q5_1Block>;

}  // namespace distmk
