// Codes of 4 bits, 32 in 16 bytes: byte i has code i in its low half, and code 16 + i in its high half.
#pragma once
#include "host/formats/row_format.h"

namespace distmk {

// The codes in a group. value(codes, i): the numbers of the codes from i on.
template <class Value>
DISTMK_INLINE void load_nibbles(const uint8_t* bytes, Group<32>& group, const Value& value) {
  using namespace simd;
  constexpr uint32_t HALF = 16 / LANES;
#pragma GCC unroll 4
  for (uint32_t i = 0; i < HALF; ++i) {
    const Ints pair = load_ints(bytes + i * LANES);
    group.codes[i] = to_floats(value(pair & 15, i * LANES));
    group.codes[HALF + i] = to_floats(value(pair >> 4, 16 + i * LANES));
  }
}

}  // namespace distmk
