// What the formats of GGUF files share (distmk/formats/gguf_blocks.py). Their blocks are groups of 32 columns or of 16;
// a word of a lane has four pairs of codes of 32 columns (distmk/formats/lane_words.py).
//   sum over a group of (code * scale + minimum) * x = scale * sum of code * x + minimum * sum of x
// Sums of x are computed once for each K block, as a product, and come as the B operand of one more mma: groups take
// the place of columns.
#pragma once
#include "device/formats/packed_tile.cuh"

namespace distmk {
namespace linear {

constexpr uint32_t GROUPS = K_TILE / LOAD_K;  // of 32 columns in a tile

// The smallest subnormals bf16 has, as factors of x: `sums` are then in units of values (see EXACT_POWER).
constexpr uint32_t SMALLEST_PAIR = 0x00010001u;

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
      const float low = sum[2 * n], high = sum[2 * n + 1];
      sums[n] = pack_bf16(low, high);
      rest[n] = pack_bf16(low - __uint_as_float(sums[n] << 16), high - __uint_as_float(sums[n] & 0xffff0000u));
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
  for (uint32_t unit = 0; unit < GROUPS / 4; ++unit) {
    const uint4 upper = tile.unit(false, unit), lower = tile.unit(true, unit);
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t group = 4 * unit + i;
      uint32_t above[4], below[4];
      decode(group, word_of(upper, i), above, false);
      decode(group, word_of(lower, i), below, true);
      MTileAccumulators<N_TILES> sums = {};
#pragma unroll
      for (uint32_t step = 0; step < 2; ++step) {
        const uint32_t a[4] = {above[2 * step], below[2 * step], above[2 * step + 1], below[2 * step + 1]};
        multiply_step<N_TILES>(a, x, 2 * group + step, sums);
      }
      add_scaled<N_TILES>(sums, scale(group, false), scale(group, true), acc);
    }
  }
}

}  // namespace linear
}  // namespace distmk
