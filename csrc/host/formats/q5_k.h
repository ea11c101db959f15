// Blocks of GGUF's Q5_K (distmk/formats/q5_k.py).
#pragma once
#include "host/formats/gguf.h"

namespace distmk {

struct Q5_KBlock {  // as Q4_K, with 32 bytes of fifth bits before the codes: bit s of byte i is that of code i of
                    // sub-block s
  static constexpr uint32_t BYTES = 176, GROUP = 32;
  static constexpr bool HAS_OFFSETS = true;
  DISTMK_INLINE static Group<GROUP> load(const uint8_t* block, uint32_t index) {
    using namespace simd;
    const ScaleMin found(block + 4, index);
    const int32_t shift = index % 2 * 4, bit = static_cast<int32_t>(index);
    Group<GROUP> group;
    group.scale = half_at(block, 0) * found.scale, group.offset = -half_at(block, 2) * found.min;
#pragma GCC unroll 8
    for (uint32_t i = 0; i < Group<GROUP>::NUM_VECTORS; ++i) {
      const Ints low = load_ints(block + 48 + index / 2 * 32 + i * LANES), high = load_ints(block + 16 + i * LANES);
      group.codes[i] = to_floats((low >> shift & 15) | (high >> bit & 1) << 4);
    }
    return group;
  }
};

using Q5_KRows = GgufRows<Q5_KFormat, Q5_KBlock>;

}  // namespace distmk
