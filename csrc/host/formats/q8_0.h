// Blocks of GGUF's Q8_0 (distmk/formats/q8_0.py).
#pragma once
#include "host/formats/gguf.h"

namespace distmk {

struct Q8_0Block {  // d, then signed bytes
  static constexpr uint32_t BYTES = 34, GROUP = 32;
  static constexpr bool HAS_OFFSETS = false;
  DISTMK_INLINE static Group<GROUP> load(const uint8_t* block, uint32_t) {
    Group<GROUP> group;
    group.scale = half_at(block, 0);
#pragma GCC unroll 8
    for (uint32_t i = 0; i < Group<GROUP>::NUM_VECTORS; ++i)
      group.codes[i] = simd::to_floats(simd::load_signed_ints(block + 2 + i * simd::LANES));
    return group;
  }
};

using Q8_0Rows = GgufRows<Q8_0Format, Q8_0Block>;

}  // namespace distmk
