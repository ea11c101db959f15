// Blocks of GGUF's Q4_0 (distmk/formats/q4_0.py).
#pragma once
#include "host/formats/gguf.h"

namespace distmk {

struct Q4_0Block {  // d, then codes
  static constexpr uint32_t BYTES = 18, GROUP = 32;
  static constexpr bool HAS_OFFSETS = false;
  DISTMK_INLINE static Group<GROUP> load(const uint8_t* block, uint32_t) {
    Group<GROUP> group;
    group.scale = half_at(block, 0);
    load_nibbles(block + 2, group, [](simd::Ints codes, uint32_t) { return codes - 8; });
    return group;
  }
};

using Q4_0Rows = GgufRows<Q4_0Format, Q4_0Block>;

}  // namespace distmk
