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
    const uint32_t lane = threadIdx.x % 32;
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

// The sums of one tile (a stage of the ring); `k` counts from the first staged activation. 64 columns of weights at a
// time, even and odd steps into sums of their own: a product waits for the last one into the same.
template <uint32_t TILES>
DISTMK_FN void multiply_tile(const char* stage, uint32_t tile_k, uint32_t k, const Lane<TILES>& lane,
                             float (&sums)[TILES][4]) {
  const uint32_t rows = shared_address(stage) + lane.row * tile_k * 2;
  float odd[TILES][4] = {};
#pragma unroll 4
  for (uint32_t at = 0; at < tile_k; at += 64) {
    uint32_t a[4][4];
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) load_matrices(rows + at * 2 + lane.chunk[i], a[i]);
#pragma unroll
    for (uint32_t tile = 0; tile < TILES; ++tile) {
      uint32_t b[2][4];  // of two steps each
      load_matrices(lane.columns[tile] + (k + at) * 2, b[0]);
      load_matrices(lane.columns[tile] + (k + at) * 2 + 64, b[1]);
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        multiply(a[2 * i], b[i][0], b[i][1], sums[tile]);
        multiply(a[2 * i + 1], b[i][2], b[i][3], odd[tile]);
      }
    }
  }
#pragma unroll
  for (uint32_t tile = 0; tile < TILES; ++tile)
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) sums[tile][i] += odd[tile][i];
}

}  // namespace linear
}  // namespace distmk
