// Packed tiles (distmk/formats/packed_tiles.py) as A operands of mma.m16n8k16. A format has a struct `<Name>Tiles` in
// the header of its name, with:
//   Constants  the numbers of its tiles (abi.h).
//   EVEN_POWER, ODD_POWER  powers of two by which activations are multiplied: pairs of columns that b0 of an mma takes
//              by the first, those of b1 by the second. Then all sums are in units of 1 / SUM_FACTOR.
//   TAKES_HALVES  whether activations are ordered by in_halves() (packed_inputs.cuh).
//   Prepared   what else it needs of the activations of a K block.
//   prepare    computes that from scaled activations.
//   multiply   acc += tile * activations, for one tile and this warp's lanes.
//
// One trick carries the formats. The bits u = 0 to 255 of a bf16 stand for u * 2^-133: subnormals and the first binade
// are equally far apart. So a code in the low eight bits of a half is a bf16 integer after one mask, and an E4M3 code
// in the right place is its value times 2^-120. Activations are multiplied by a power of two (exactly), and SUM_FACTOR
// undoes both.
#pragma once
#include "device/linear/activations.cuh"
#include "device/linear/mainloop.cuh"

namespace distmk {
namespace linear {

// Whether decoded operands are made normal numbers, by one more instruction for each register: for tensor cores that
// take subnormal bf16 for zero.
constexpr bool NORMAL_OPERANDS = false;
constexpr int NORMAL_SHIFT = NORMAL_OPERANDS ? 120 : 0;
constexpr uint32_t both_halves(uint32_t half) { return half | half << 16; }
// A pair of bf16 numbers 2^exponent; `exponent` is more than -127.
constexpr uint32_t pair_of_powers(int exponent) { return both_halves(static_cast<uint32_t>(127 + exponent) << 7); }
DISTMK_FN uint32_t normal(uint32_t pair) {
  return NORMAL_OPERANDS ? multiply_pairs(pair, pair_of_powers(NORMAL_SHIFT)) : pair;
}

constexpr float SUM_FACTOR = 0x1p69f;
// EVEN_POWER of operands that are values * 2^-power.
constexpr int power_for(int power) { return power - 69 - NORMAL_SHIFT; }

DISTMK_FN uint32_t word_of(const uint4& v, uint32_t i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// The places of this lane's rows g and g + 8 in a tile of F, with lane = 4 g + t.
template <class F>
struct PackedLane {
  using C = typename F::Constants;
  static constexpr uint32_t UNIT_BYTES = 4 * sizeof(uint4);
  uint32_t g, even, odd;  // even, odd: bytes at which units with these numbers begin

  DISTMK_FN PackedLane() {
    const uint32_t lane = opaque(threadIdx.x % 32);  // else the compiler would keep all this across tasks
    g = lane / 4;
    even = C::TILE_SCALE_BYTES + g * C::TILE_ROW_BYTES + lane % 4 * sizeof(uint4);
    odd = even;
    if (C::TILE_ROW_BYTES / UNIT_BYTES % 2) return;
    even += g % 2 * UNIT_BYTES;
    odd -= g % 2 * UNIT_BYTES;
  }
};

// A tile as this lane sees it. Rows behind the last one of the tile are anything.
template <class F>
class PackedTile {
 public:
  DISTMK_FN PackedTile(const char* tile, const PackedLane<F>& lane)
      : even_(tile + lane.even), odd_(tile + lane.odd), scales_(tile), g_(lane.g) {}
  // Unit i of row g, or of row g + 8.
  DISTMK_FN uint4 unit(bool lower, uint32_t i) const {
    const char* from = (i % 2 ? odd_ : even_) + (lower ? 8 * C::TILE_ROW_BYTES : 0) + i * PackedLane<F>::UNIT_BYTES;
    return *reinterpret_cast<const uint4*>(from);
  }
  // A word of it.
  DISTMK_FN uint32_t word(bool lower, uint32_t i, uint32_t word) const {
    const char* from = (i % 2 ? odd_ : even_) + (lower ? 8 * C::TILE_ROW_BYTES : 0) + i * PackedLane<F>::UNIT_BYTES;
    return reinterpret_cast<const uint32_t*>(from)[word];
  }
  // The scales of rows g and g + 8 in a section that begins at `begin`.
  template <class T>
  DISTMK_FN T scales(uint32_t begin) const {
    return *reinterpret_cast<const T*>(scales_ + begin + g_ * sizeof(T));
  }
  // Word i of row g, or g + 8, in a section of 16 bytes a row. Words are loaded when they are needed: with two N tiles,
  // there are no registers to keep them in.
  DISTMK_FN uint32_t word_of_row(uint32_t begin, bool lower, uint32_t i) const {
    return reinterpret_cast<const uint32_t*>(scales_ + begin + (2 * g_ + lower) * 16)[i];
  }
  // Word i of a section of eight bytes a row.
  DISTMK_FN uint32_t word_of_eight(uint32_t begin, bool lower, uint32_t i) const {
    return reinterpret_cast<const uint32_t*>(scales_ + begin + (2 * g_ + lower) * 8)[i];
  }
  // The scales of rows g and g + 8 in a section with numbers for each lane.
  template <class T>
  DISTMK_FN T lane_scales(uint32_t begin) const {
    return *reinterpret_cast<const T*>(scales_ + begin + opaque(threadIdx.x) % 32 * sizeof(T));
  }
  // Bytes 2 t and 2 t + 1 of row g, or g + 8, in a section of eight bytes a row: in the two halves of a word.
  DISTMK_FN uint32_t pair_of_bytes(uint32_t begin, bool lower) const {
    const char* from = scales_ + begin + (2 * g_ + lower) * 8 + opaque(threadIdx.x) % 4 * 2;
    const uint32_t both = *reinterpret_cast<const uint16_t*>(from);
    return (both & 0xff) | (both & 0xff00) << 8;
  }
  // Numbers 2 t and 2 t + 1 of row g, or g + 8, in a section of eight float16 numbers a row.
  DISTMK_FN uint32_t pair_of_halves(uint32_t begin, bool lower) const {
    const char* from = scales_ + begin + (2 * g_ + lower) * 16 + opaque(threadIdx.x) % 4 * 4;
    return *reinterpret_cast<const uint32_t*>(from);
  }

 private:
  using C = typename F::Constants;
  const char *even_, *odd_, *scales_;
  uint32_t g_;
};

// acc += a * the activations of step `step` of a K tile's 16.
template <uint32_t N_TILES>
DISTMK_FN void multiply_step(const uint32_t (&a)[4], const FragmentB<N_TILES>& x, uint32_t step,
                             MTileAccumulators<N_TILES>& acc) {
#pragma unroll
  for (uint32_t n = 0; n < N_TILES; ++n) {
    const uint4& chunk = x.chunks[n][step / 2];
    multiply(a, step % 2 ? chunk.z : chunk.x, step % 2 ? chunk.w : chunk.y, acc[n]);
  }
}

// acc += sums, times `upper` in row g and `lower` in row g + 8.
template <uint32_t N_TILES>
DISTMK_FN void add_scaled(const MTileAccumulators<N_TILES>& sums, float upper, float lower,
                          MTileAccumulators<N_TILES>& acc) {
#pragma unroll
  for (uint32_t n = 0; n < N_TILES; ++n)
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) acc[n][i] += (i < 2 ? upper : lower) * sums[n][i];
}

}  // namespace linear
}  // namespace distmk
