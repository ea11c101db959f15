// What the formats of GGUF files share (distmk/formats/gguf_blocks.py). Their blocks are groups of 32 columns or of 16;
// a word of a lane has four pairs of codes of 32 columns (distmk/formats/lane_words.py).
//   sum over a group of (code * scale + minimum) * x = scale * sum of code * x + minimum * sum of x
// Sums of x are computed once for each K block, as a product, and come as the B operand of one more mma: groups take
// the place of columns.
#pragma once
#include "device/core/bf16.cuh"
#include "device/formats/packed_tile.cuh"

namespace distmk {
namespace linear {

constexpr uint32_t GROUPS = K_TILE / LOAD_K;  // of 32 columns in a tile

// Operands that are the integers themselves.
constexpr int EXACT_POWER = -69;
// Codes below 128, minus `offset`, as such operands.
DISTMK_FN uint32_t signed_pair(uint32_t codes, uint32_t offset) {
  return add_pairs(codes | 0x43004300u, 0xc300c300u | both_halves(offset));  // 128 + code, -128 - offset
}

DISTMK_FN uint32_t shifted_right(uint32_t v, int by) { return by >= 0 ? v >> by : v << -by; }
// Pair `pair` of a word of nibbles, with HIGH_BITS more bits from pair `index` of a word of high bits.
template <uint32_t HIGH_BITS>
DISTMK_FN uint32_t pair_of_codes(uint32_t nibbles, uint32_t pair, uint32_t high, uint32_t index) {
  constexpr uint32_t MASK = both_halves(((1u << HIGH_BITS) - 1) << 4);
  const int shift = static_cast<int>(HIGH_BITS * index) - 4;
  return (nibbles >> 4 * pair & 0x000f000fu) | (shifted_right(high, shift) & MASK);
}

// Byte `i` of a word as a number, plus 2^23 - `offset`.
DISTMK_FN float byte_at(uint32_t word, uint32_t i, float offset = 0.0f) {
  return __uint_as_float(0x4b000000u | (word >> 8 * i & 0xff)) - (0x1p23f + offset);
}

// Sums of the activations of groups 2 t and 2 t + 1, for token g of each N tile: bf16 pairs of the sums and of what is
// left of them, so that 16 bits are exact. This is what an mma takes as B.
template <uint32_t N_TILES>
struct GroupSums {
  uint32_t sums[N_TILES], rest[N_TILES];

  // The sums times a factor, which is `first` for the columns of b0 and `second` for those of b1.
  DISTMK_FN void compute(const FragmentB<N_TILES>& x, uint32_t first, uint32_t second) {
    // Tokens are the rows of A here, and groups the columns of B: it has the factor in the column of a step's group.
    float sum[4] = {};
    const uint32_t own = opaque(threadIdx.x) % 32 / 4;
#pragma unroll
    for (uint32_t step = 0; step < 2 * GROUPS; ++step) {
      const uint4 &upper = x.chunks[0][step / 2], &lower = x.chunks[N_TILES - 1][step / 2];
      const uint32_t a[4] = {step % 2 ? upper.z : upper.x,
                             N_TILES == 1 ? 0
                             : step % 2   ? lower.z
                                          : lower.x,
                             step % 2 ? upper.w : upper.y,
                             N_TILES == 1 ? 0
                             : step % 2   ? lower.w
                                          : lower.y};
      multiply(a, own == step / 2 ? first : 0, own == step / 2 ? second : 0, sum);
    }
#pragma unroll
    for (uint32_t n = 0; n < N_TILES; ++n) {
      const Halves halves(sum[2 * n], sum[2 * n + 1]);
      sums[n] = halves.high, rest[n] = halves.low;
    }
  }
  // acc += the sum over groups of minimum * sum of x. `upper`, `lower`: the pair of minima of groups 2 t and 2 t + 1 in
  // rows g and g + 8.
  DISTMK_FN void multiply_minima(uint32_t upper, uint32_t lower, MTileAccumulators<N_TILES>& acc) const {
    const uint32_t a[4] = {upper, lower, upper, lower};
#pragma unroll
    for (uint32_t n = 0; n < N_TILES; ++n) multiply(a, sums[n], rest[n], acc[n]);
  }
};

// acc += the products of all groups of 32 columns. `decode(group, word, pairs, lower)` makes operands of a word of row
// g or g + 8, `scale(group, lower)` is the group's scale in that row.
template <class F, uint32_t N_TILES, class Decode, class Scale>
DISTMK_FN void multiply_groups(const PackedTile<F>& tile, const FragmentB<N_TILES>& x, const Decode& decode,
                               const Scale& scale, MTileAccumulators<N_TILES>& acc) {
#pragma unroll
  for (uint32_t group = 0; group < GROUPS; ++group) {
    uint32_t above[4], below[4];
    decode(group, tile.word(false, group / 4, group % 4), above, false);
    decode(group, tile.word(true, group / 4, group % 4), below, true);
    MTileAccumulators<N_TILES> sums = {};
#pragma unroll
    for (uint32_t step = 0; step < 2; ++step) {
      const uint32_t a[4] = {above[2 * step], below[2 * step], above[2 * step + 1], below[2 * step + 1]};
      multiply_step<N_TILES>(a, x, 2 * group + step, sums);
    }
    add_scaled<N_TILES>(sums, scale(group, false), scale(group, true), acc);
  }
}

// The pairs of a word, as subnormal operands: b1's are 16 times as large as b0's.
DISTMK_FN void decode_nibbles(uint32_t word, uint32_t (&pairs)[4]) {
  pairs[0] = normal(word & 0x000f000fu);
  pairs[1] = normal(word & 0x00f000f0u);
  pairs[2] = normal(word >> 8 & 0x000f000fu);
  pairs[3] = normal(word >> 8 & 0x00f000f0u);
}

// The highest bits of codes of five, which begin a tile's scales.
struct FifthBits {
  static constexpr uint32_t BYTES = M_TILE * K_TILE / 8;
  uint2 upper, lower;  // of row g, and of row g + 8

  template <class F>
  DISTMK_FN explicit FifthBits(const PackedTile<F>& tile) {
    const uint4 both = tile.template lane_scales<uint4>(0);
    upper = {both.x, both.y};
    lower = {both.z, both.w};
  }
  DISTMK_FN void decode(uint32_t group, uint32_t word, uint32_t (&pairs)[4], bool of_lower) const {
    const uint2& bits = of_lower ? lower : upper;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i)
      pairs[i] = pair_of_codes<1>(word, i, group < 4 ? bits.x : bits.y, group % 4 * 4 + i);
  }
};

// The scale of a group in a section of eight float16 numbers a row.
template <class F>
DISTMK_FN float half_scale(const PackedTile<F>& tile, uint32_t begin, uint32_t group, bool lower) {
  return half_to_float(tile.word_of_row(begin, lower, group / 2) >> 16 * (group % 2));
}

// Groups with a float16 scale each, in the section that begins at `begin`.
template <class F, uint32_t N_TILES, class Decode>
DISTMK_FN void multiply_scaled_groups(const PackedTile<F>& tile, uint32_t begin, const FragmentB<N_TILES>& x,
                                      const Decode& decode, MTileAccumulators<N_TILES>& acc) {
  multiply_groups(
      tile, x, decode, [&](uint32_t group, bool lower) { return half_scale(tile, begin, group, lower); }, acc);
}

// acc += the float16 minima of groups times their sums. Two bf16 numbers are a float16 exactly.
template <class F, uint32_t N_TILES>
DISTMK_FN void multiply_half_minima(const PackedTile<F>& tile, uint32_t begin, const GroupSums<N_TILES>& sums,
                                    MTileAccumulators<N_TILES>& acc) {
  uint32_t minima[2], rest[2];
#pragma unroll
  for (uint32_t lower = 0; lower < 2; ++lower) {
    const uint32_t both = tile.pair_of_halves(begin, lower);
    const Halves halves(half_to_float(both), half_to_float(both >> 16));
    minima[lower] = halves.high, rest[lower] = halves.low;
  }
  sums.multiply_minima(minima[0], minima[1], acc);
  sums.multiply_minima(rest[0], rest[1], acc);
}

// A super-block is a row of a tile. Its sections are eight scales, eight minima, and their float16 scales, from `begin`
// on.
template <class F, uint32_t N_TILES, class Decode>
DISTMK_FN void multiply_super_blocks(const PackedTile<F>& tile, uint32_t begin, const FragmentB<N_TILES>& x,
                                     const GroupSums<N_TILES>& negated, const Decode& decode,
                                     MTileAccumulators<N_TILES>& acc) {
  MTileAccumulators<N_TILES> products = {}, minima = {};
  multiply_groups(
      tile, x, decode,
      [&](uint32_t group, bool lower) { return byte_at(tile.word_of_eight(begin, lower, group / 4), group % 4); },
      products);
  const uint2 halves = tile.template scales<uint2>(begin + 2 * M_TILE * GROUPS);
  add_scaled<N_TILES>(products, half_to_float(halves.x), half_to_float(halves.y), acc);
  // Minima are integers below 64: subnormal numbers, as codes are.
  const uint32_t upper = tile.pair_of_bytes(begin + M_TILE * GROUPS, false),
                 lower = tile.pair_of_bytes(begin + M_TILE * GROUPS, true);
  negated.multiply_minima(normal(upper), normal(lower), minima);
  add_scaled<N_TILES>(minima, half_to_float(halves.x >> 16), half_to_float(halves.y >> 16), acc);
}

}  // namespace linear
}  // namespace distmk
