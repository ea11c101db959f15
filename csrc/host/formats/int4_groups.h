// Rows of 4-bit codes in groups with a scale and a zero point each (distmk/formats/int4_groups.py).
#pragma once
#include "host/formats/nibbles.h"

namespace distmk {

template <class Format>
struct Int4GroupRows {
  static constexpr uint32_t GROUP = 32;
  static constexpr bool HAS_OFFSETS = false;
  static uint64_t num_scales(uint32_t k) { return (k + Format::GROUP_COLS - 1) / Format::GROUP_COLS; }
  static uint64_t codes_begin(uint32_t k) { return num_scales(k) * (sizeof(float) + 1); }
  static uint64_t row_bytes(uint32_t k) { return codes_begin(k) + (k + GROUP - 1) / GROUP * (GROUP / 2); }

  DISTMK_INLINE static Group<GROUP> load(const uint8_t* row, uint32_t k, uint32_t index) {
    const uint32_t scale = index / (Format::GROUP_COLS / GROUP);
    const int32_t zero = row[num_scales(k) * sizeof(float) + scale];
    Group<GROUP> group;
    memcpy(&group.scale, row + scale * sizeof(float), sizeof(float));
    load_nibbles(row + codes_begin(k) + uint64_t{index} * (GROUP / 2), group,
                 [&](simd::Ints codes, uint32_t) { return codes - zero; });
    return group;
  }
};

}  // namespace distmk
