// Blocks of GGUF's Q4_1 (distmk/formats/q4_1.py).
#pragma once
#include "host/formats/gguf.h"

namespace distmk {

struct Q4_1Block {  // d and m, then codes
  static constexpr uint32_t BYTES = 20, GROUP = 32;
  static constexpr bool HAS_OFFSETS = true;
  DISTMK_INLINE static Group<GROUP> load(const uint8_t* block, uint32_t) {
    Group<GROUP> group;
    group.scale = half_at(block, 0), group.offset = half_at(block, 2);
    load_nibbles(block + 4, group, [](simd::Ints codes, uint32_t) { return codes; });
    return group;
  }
};

using Q4_1Rows = GgufRows<Q4_1Format, Q4_1Block>;

}  // namespace distmk
