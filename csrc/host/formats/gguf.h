// Blocks of GGUF files, as they are stored: the structs of ggml-common.h in llama.cpp.
#pragma once
#include "host/formats/nibbles.h"

namespace distmk {

// The float16 at byte `at` of a block.
DISTMK_INLINE float half_at(const uint8_t* block, uint32_t at) {
  uint16_t bits;
  memcpy(&bits, block + at, sizeof bits);
  return simd::from_f16(bits);
}

// The fifth bits of 32 codes, as 16 or 0: of the codes from `first` on.
DISTMK_INLINE simd::Ints fifth_bits(uint32_t bits, uint32_t first) {
  simd::Bits lane;
  for (uint32_t i = 0; i < simd::LANES; ++i) lane[i] = i;
  return reinterpret_cast<simd::Ints>(((simd::Bits{} + bits) >> (lane + first) & 1u) << 4);
}

// The scale and the minimum of sub-block j of 8, 6 bits each in 12 bytes (Q4_K, Q5_K).
struct ScaleMin {
  float scale, min;

  DISTMK_INLINE ScaleMin(const uint8_t* packed, uint32_t j) {
    const uint32_t low = packed[j], high = packed[j + 4];
    if (j < 4) {
      scale = static_cast<float>(low & 63), min = static_cast<float>(high & 63);
    } else {
      scale = static_cast<float>((high & 15) | (packed[j - 4] >> 6) << 4);
      min = static_cast<float>((high >> 4) | (low >> 6) << 4);
    }
  }
};

// Rows of blocks of a type `Block`, with BYTES, GROUP, HAS_OFFSETS and `load(block, group)`: a group of a block.
template <class Format, class Block>
struct GgufRows {
  static constexpr uint32_t GROUP = Block::GROUP, PER_BLOCK = Format::GROUP_COLS / GROUP;
  static constexpr bool HAS_OFFSETS = Block::HAS_OFFSETS;
  static uint64_t row_bytes(uint32_t k) { return uint64_t{k} / Format::GROUP_COLS * Block::BYTES; }

  DISTMK_INLINE static Group<GROUP> load(const uint8_t* row, uint32_t, uint32_t index) {
    return Block::load(row + uint64_t{index / PER_BLOCK} * Block::BYTES, index % PER_BLOCK);
  }
};

}  // namespace distmk
