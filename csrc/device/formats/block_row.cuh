// Rows of packed tiles decoded to bf16, for products in jobs (device/jobs/packed_reader.cuh): blocks of BLOCK_COLS
// columns, by halves of LOAD_K. For that, a format's tiles (packed_tile.cuh) also have a struct `BlockRow`:
//   BlockRow(row, block)  loads what a lane needs of a block in a row: codes and scales
//   decode(half)          the lane's weights in a half of the block: columns 8 t to 8 t + 7 of 32, in four pairs
//
// A weight is code * scale (+ minimum), rounded once to bf16, so it is wrong by at most 2^-9 of itself. A scale is two
// bf16 numbers, which have 16 bits of it: with fewer, all weights of a group would be wrong in the same direction.
#pragma once
#include "device/core/bf16.cuh"
#include "device/formats/packed_tile.cuh"

namespace distmk {
namespace linear {

constexpr uint32_t BLOCK_COLS = 64, HALVES_PER_BLOCK = BLOCK_COLS / LOAD_K;

// Row g of a tile, or row g + 8 if `lower`, as lane 4 g + t sees it. `tile`: its address in shared memory.
template <class F>
class TileRow {
 public:
  DISTMK_FN TileRow(uint32_t tile, bool lower) : tile_(tile), lower_(lower) {}

  // From byte `byte` on of this lane's codes in a unit.
  template <class T>
  DISTMK_FN T codes(uint32_t unit, uint32_t byte = 0) const {
    constexpr uint32_t UNIT_BYTES = PackedLane<F>::UNIT_BYTES;
    const uint32_t swizzled = C::TILE_ROW_BYTES / UNIT_BYTES % 2 ? unit : unit ^ g() % 2;
    const uint32_t row = tile_ + C::TILE_SCALE_BYTES + (g() + 8 * lower_) * C::TILE_ROW_BYTES;
    return load_shared_as<T>(row + lane() % 4 * sizeof(uint4) + swizzled * UNIT_BYTES + byte);
  }
  // From byte `byte` on of this row in a section that begins at `begin` and has ROW_BYTES bytes a row.
  template <class T, uint32_t ROW_BYTES>
  DISTMK_FN T scales(uint32_t begin, uint32_t byte) const {
    return load_shared_as<T>(tile_ + begin + (2 * g() + lower_) * ROW_BYTES + byte);
  }
  // The same of a section that has LANE_BYTES bytes for each lane of a row.
  template <class T, uint32_t LANE_BYTES>
  DISTMK_FN T lane_scales(uint32_t begin, uint32_t byte) const {
    return load_shared_as<T>(tile_ + begin + (2 * lane() + lower_) * LANE_BYTES + byte);
  }

 private:
  using C = typename F::Constants;
  uint32_t tile_, lower_;

  DISTMK_FN static uint32_t lane() { return threadIdx.x % 32; }
  DISTMK_FN static uint32_t g() { return lane() / 4; }
};

// A scale, twice in each half of a register: high + low.
struct SplitScale {
  uint32_t high, low;

  SplitScale() = default;
  DISTMK_FN explicit SplitScale(float scale) {
    const Halves halves(scale, scale);
    high = halves.high, low = halves.low;
  }
  // A pair of codes that bf16 holds, times the scale.
  DISTMK_FN uint32_t times(uint32_t codes) const { return fma_pairs(codes, high, multiply_pairs(codes, low)); }
};

// Scale and minimum of a group of codes below 128.
struct AffineScale {
  float scale, minimum;

  // code * scale + minimum for a pair of codes.
  DISTMK_FN uint32_t times(uint32_t codes) const {
    const uint32_t pair = codes | both_halves(0x4300);  // 128 + code
    const float begin = minimum - 128.0f * scale;
    return pack_bf16(low_of_pair(pair) * scale + begin, high_of_pair(pair) * scale + begin);
  }
};

}  // namespace linear
}  // namespace distmk
