// Blocks of GGUF's Q6_K (distmk/formats/q6_k.py).
#pragma once
#include "host/formats/gguf.h"

namespace distmk {

struct Q6_KBlock {  // low 4 bits, high 2 bits, 16 signed scales, then d. Each half of a block has four parts of 32
                    // codes.
  static constexpr uint32_t BYTES = 210, GROUP = 16;
  static constexpr bool HAS_OFFSETS = false;
  DISTMK_INLINE static Group<GROUP> load(const uint8_t* block, uint32_t index) {
    using namespace simd;
    const uint32_t half = index / 8, part = index / 2 % 4, begin = index % 2 * 16;
    const uint8_t *low = block + 64 * half + part % 2 * 32 + begin, *high = block + 128 + 32 * half + begin;
    const int32_t low_shift = part / 2 * 4, high_shift = 2 * part;
    Group<GROUP> group;
    group.scale = half_at(block, 208) * static_cast<float>(static_cast<int8_t>(block[192 + index]));
#pragma GCC unroll 8
    for (uint32_t i = 0; i < Group<GROUP>::NUM_VECTORS; ++i) {
      const Ints bits = load_ints(low + i * LANES) >> low_shift & 15,
                 more = load_ints(high + i * LANES) >> high_shift & 3;
      group.codes[i] = to_floats((bits | more << 4) - 32);
    }
    return group;
  }
};

using Q6_KRows = GgufRows<Q6_KFormat, Q6_KBlock>;

}  // namespace distmk
