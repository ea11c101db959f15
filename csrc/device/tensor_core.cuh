// Tiles of weights times activations on tensor cores: rows of weights are the m dimension, tokens the n dimension.
#pragma once
#include "device/activations.cuh"

namespace distmk {
namespace linear {

// Where this lane reads what it gives to the tensor core.
template <uint32_t TILES>
struct Lane {
  uint32_t row,
      chunk[4];  // of a tile of weights: its row, and the 16-byte chunks of four steps, as they were exchanged
  uint32_t columns[TILES];  // of the activations, in bytes

  DISTMK_FN explicit Lane(const Activations& x) {
    const uint32_t lane = opaque(threadIdx.x % 32);  // or it would be worked out anew for every tile
    row = lane % 16;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) chunk[i] = ((2 * i + lane / 16) ^ (row % 8)) * 16;
#pragma unroll
    for (uint32_t tile = 0; tile < TILES; ++tile) {
      // A column that belongs to no token only spoils its own sums, which nobody reads.
      const uint32_t column = tile * 8 + lane % 8, present = column < x.num_rows ? column : 0;
      columns[tile] = shared_address(shared().vector) + present * x.column_stride() * 2 + lane / 8 * 16;
    }
  }
};

constexpr uint32_t STEP_K = 64;  // columns of weights whose products are in flight together

// Of a step of a tile: 16 columns each.
using Step = uint32_t[STEP_K / 16][4];

template <uint32_t TILES>
DISTMK_FN void load_step(uint32_t tile_row, uint32_t at, const Lane<TILES>& lane, Step& a) {
#pragma unroll
  for (uint32_t i = 0; i < STEP_K / 16; ++i) load_matrices(tile_row + at * 2 + lane.chunk[i], a[i]);
}

// `k` counts from the first staged activation. Even and odd columns of tiles go into sums of their own: a product waits
// for the last one into the same.
template <uint32_t TILES>
DISTMK_FN void multiply_step(const Step& a, uint32_t k, const Lane<TILES>& lane, float (&even)[TILES][4],
                             float (&odd)[TILES][4]) {
#pragma unroll
  for (uint32_t tile = 0; tile < TILES; ++tile) {
    uint32_t b[2][4];  // of two columns of tiles each
    load_matrices(lane.columns[tile] + k * 2, b[0]);
    load_matrices(lane.columns[tile] + k * 2 + 64, b[1]);
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      multiply(a[2 * i], b[i][0], b[i][1], even[tile]);
      multiply(a[2 * i + 1], b[i][2], b[i][3], odd[tile]);
    }
  }
}

template <uint32_t TILES>
DISTMK_FN void add_sums(const float (&from)[TILES][4], float (&sums)[TILES][4]) {
#pragma unroll
  for (uint32_t tile = 0; tile < TILES; ++tile)
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) sums[tile][i] += from[tile][i];
}

// The sums of one tile, which lies in a stage of the ring.
template <uint32_t TILES>
DISTMK_FN void multiply_tile(const char* stage, uint32_t tile_k, uint32_t k, const Lane<TILES>& lane,
                             float (&sums)[TILES][4]) {
  const uint32_t row = shared_address(stage) + lane.row * tile_k * 2;
  float odd[TILES][4] = {};
#pragma unroll 4
  for (uint32_t at = 0; at < tile_k; at += STEP_K) {
    Step a;
    load_step<TILES>(row, at, lane, a);
    multiply_step<TILES>(a, k + at, lane, sums, odd);
  }
  add_sums<TILES>(odd, sums);
}

// A whole tile that a warp holds in registers.
template <uint32_t TILES>
struct HeldTile {
  Step steps[TILE_K / STEP_K];

  DISTMK_FN void load(const char* stage, const Lane<TILES>& lane) {
    const uint32_t row = shared_address(stage) + lane.row * TILE_K * 2;
#pragma unroll
    for (uint32_t i = 0; i < TILE_K / STEP_K; ++i) load_step<TILES>(row, i * STEP_K, lane, steps[i]);
  }
  DISTMK_FN void multiply(uint32_t k, const Lane<TILES>& lane, float (&sums)[TILES][4]) const {
    float odd[TILES][4] = {};
#pragma unroll
    for (uint32_t i = 0; i < TILE_K / STEP_K; ++i) multiply_step<TILES>(steps[i], k + i * STEP_K, lane, sums, odd);
    add_sums<TILES>(odd, sums);
  }
};

}  // namespace linear
}  // namespace distmk
