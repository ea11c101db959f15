// What the formats of GGUF files share when their rows are decoded block by block (block_row.cuh). A half of a block is
// a group of 32 columns, and a word of a lane has its four pairs of codes (distmk/formats/lane_words.py).
#pragma once
#include "device/formats/block_row.cuh"
#include "device/formats/gguf_codes.cuh"

namespace distmk {
namespace linear {

// The low four bits of codes.
struct NibbleBlock {
  uint2 words;

  NibbleBlock() = default;
  template <class F>
  DISTMK_FN NibbleBlock(const TileRow<F>& row, uint32_t block)
      : words(row.template codes<uint2>(block / 2, block % 2 * sizeof(uint2))) {}
  DISTMK_FN uint32_t word(uint32_t half) const { return half ? words.y : words.x; }
  DISTMK_FN uint32_t pair(uint32_t half, uint32_t i) const { return word(half) >> 4 * i & 0x000f000fu; }
};

// Codes of five bits, whose highest bits begin a tile's scales.
struct FifthBitBlock {
  NibbleBlock low;
  uint32_t high;

  FifthBitBlock() = default;
  template <class F>
  DISTMK_FN FifthBitBlock(const TileRow<F>& row, uint32_t block)
      : low(row, block), high(row.template lane_scales<uint32_t, sizeof(uint2)>(0, block / 2 * 4) >> block % 2 * 8) {}
  DISTMK_FN uint32_t pair(uint32_t half, uint32_t i) const {
    return pair_of_codes<1>(low.word(half), i, high, 4 * half + i);
  }
};

// The float16 numbers of both halves, in a section that begins at `begin`.
struct HalfNumbers {
  uint32_t both;

  HalfNumbers() = default;
  template <class F>
  DISTMK_FN HalfNumbers(const TileRow<F>& row, uint32_t begin, uint32_t block)
      : both(row.template scales<uint32_t, 2 * GROUPS>(begin, 4 * block)) {}
  DISTMK_FN float of(uint32_t half) const { return half_to_float(both >> 16 * half); }
};
constexpr uint32_t HALF_NUMBERS_BYTES = M_TILE * 2 * GROUPS;

// Scales and minima of both halves, from `begin` on: float16 numbers, or bytes of a super-block (a row of a tile) with
// their float16 scales behind them.
struct HalfScales {
  HalfNumbers scales, minima;

  HalfScales() = default;
  template <class F>
  DISTMK_FN HalfScales(const TileRow<F>& row, uint32_t begin, uint32_t block)
      : scales(row, begin, block), minima(row, begin + HALF_NUMBERS_BYTES, block) {}
  DISTMK_FN AffineScale of(uint32_t half) const { return {scales.of(half), minima.of(half)}; }
};
struct SuperBlockScales {
  uint32_t scales, minima, units;

  SuperBlockScales() = default;
  template <class F>
  DISTMK_FN SuperBlockScales(const TileRow<F>& row, uint32_t begin, uint32_t block)
      : scales(row.template scales<uint16_t, GROUPS>(begin, 2 * block)),
        minima(row.template scales<uint16_t, GROUPS>(begin + M_TILE * GROUPS, 2 * block)),
        units(row.template scales<uint32_t, 4>(begin + 2 * M_TILE * GROUPS, 0)) {}
  DISTMK_FN AffineScale of(uint32_t half) const {
    return {half_to_float(units) * byte_at(scales, half), -half_to_float(units >> 16) * byte_at(minima, half)};
  }
};

// Four pairs, each `pair(i)`.
template <class Pair>
DISTMK_FN uint4 four_pairs(const Pair& pair) {
  return {pair(0u), pair(1u), pair(2u), pair(3u)};
}

// A block of codes around OFFSET, with a float16 scale for each half in a section that begins at SCALES.
template <class Codes, uint32_t OFFSET, uint32_t SCALES>
struct SignedBlockRow {
  Codes codes;
  HalfNumbers scales;

  SignedBlockRow() = default;
  template <class F>
  DISTMK_FN SignedBlockRow(const TileRow<F>& row, uint32_t block) : codes(row, block), scales(row, SCALES, block) {}
  DISTMK_FN uint4 decode(uint32_t half) const {
    const SplitScale scale(scales.of(half));
    return four_pairs([&](uint32_t i) { return scale.times(signed_pair(codes.pair(half, i), OFFSET)); });
  }
};
// A block of codes with a scale and a minimum for each half, in sections that begin at SCALES.
template <class Codes, class Scales, uint32_t SCALES>
struct AffineBlockRow {
  Codes codes;
  Scales scales;

  AffineBlockRow() = default;
  template <class F>
  DISTMK_FN AffineBlockRow(const TileRow<F>& row, uint32_t block) : codes(row, block), scales(row, SCALES, block) {}
  DISTMK_FN uint4 decode(uint32_t half) const {
    const AffineScale scale = scales.of(half);
    return four_pairs([&](uint32_t i) { return scale.times(codes.pair(half, i)); });
  }
};

}  // namespace linear
}  // namespace distmk
