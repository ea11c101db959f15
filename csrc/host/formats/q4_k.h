// Blocks of GGUF's Q4_K (distmk/formats/q4_k.py).
#pragma once
#include "host/formats/gguf.h"

namespace distmk {

struct Q4_KBlock {  // d and dmin, packed scales and minima of 8 sub-blocks, then the codes of 4 pairs of sub-blocks
  static constexpr uint32_t BYTES = 144, GROUP = 32;
  static constexpr bool HAS_OFFSETS = true;
  DISTMK_INLINE static Group<GROUP> load(const uint8_t* block, uint32_t index) {
    const ScaleMin found(block + 4, index);
    const int32_t shift = index % 2 * 4;
    Group<GROUP> group;
    group.scale = half_at(block, 0) * found.scale, group.offset = -half_at(block, 2) * found.min;
#pragma GCC unroll 8
    for (uint32_t i = 0; i < Group<GROUP>::NUM_VECTORS; ++i)
      group.codes[i] = simd::to_floats(simd::load_ints(block + 16 + index / 2 * 32 + i * simd::LANES) >> shift & 15);
    return group;
  }
};

using Q4_KRows = GgufRows<Q4_KFormat, Q4_KBlock>;

}  // namespace distmk
