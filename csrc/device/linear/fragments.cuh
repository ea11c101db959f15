// Tiles of weights times activations on tensor cores: rows of weights are the m dimension, tokens the n dimension.
#pragma once
#include "device/linear/activations.cuh"

namespace distmk {
namespace linear {

// Where this lane reads weights that it gives to the tensor core: the row of a tile, and the 16-byte chunks of four
// products, as they were exchanged.
struct Lane {
  uint32_t row, chunk[4];

  DISTMK_FN Lane() {
    const uint32_t lane = opaque(threadIdx.x % 32);  // or it would be worked out anew for every tile
    row = lane % 16;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) chunk[i] = ((2 * i + lane / 16) ^ (row % 8)) * 16;
  }
};

constexpr uint32_t STEP_K = 64;  // columns of weights whose products are in flight together

// Of a step of a tile: 16 columns each.
using Step = uint32_t[STEP_K / 16][4];

DISTMK_FN void load_step(uint32_t tile_row, uint32_t at, const Lane& lane, Step& a) {
#pragma unroll
  for (uint32_t i = 0; i < STEP_K / 16; ++i) load_matrices(tile_row + at * 2 + lane.chunk[i], a[i]);
}

// Products go into sums of their own in turn: one waits for the last one into the same.
template <uint32_t N_TILES>
DISTMK_FN void multiply_step(const Step& a, const Column<N_TILES>& x, uint32_t step, float (&even)[N_TILES][4],
                             float (&odd)[N_TILES][4]) {
  static_assert(STEP_K == 2 * LOAD_K, "");
#pragma unroll
  for (uint32_t tile = 0; tile < N_TILES; ++tile)
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const uint4& b = x.chunks[tile][2 * step + i];
      multiply(a[2 * i], b.x, b.y, even[tile]);
      multiply(a[2 * i + 1], b.z, b.w, odd[tile]);
    }
}

template <uint32_t N_TILES>
DISTMK_FN void add_sums(const float (&from)[N_TILES][4], float (&sums)[N_TILES][4]) {
#pragma unroll
  for (uint32_t tile = 0; tile < N_TILES; ++tile)
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) sums[tile][i] += from[tile][i];
}

// The sums of one tile of `tile_k` columns, which lies in a stage of the ring. A whole one without branches, which
// would keep loads of weights from being ahead of products.
template <uint32_t N_TILES>
DISTMK_FN void multiply_tile(const char* stage, uint32_t tile_k, const Column<N_TILES>& x, const Lane& lane,
                             float (&sums)[N_TILES][4]) {
  const uint32_t row = shared_address(stage) + lane.row * tile_k * 2;
  float odd[N_TILES][4] = {};
  const auto multiply_next = [&](uint32_t step) {
    Step a;
    load_step(row, step * STEP_K, lane, a);
    multiply_step<N_TILES>(a, x, step, sums, odd);
  };
  if (tile_k == K_TILE) {
#pragma unroll
    for (uint32_t step = 0; step < K_TILE / STEP_K; ++step) multiply_next(step);
  } else {
#pragma unroll
    for (uint32_t step = 0; step < K_TILE / STEP_K; ++step)
      if (step * STEP_K < tile_k) multiply_next(step);
  }
  add_sums<N_TILES>(odd, sums);
}

// A whole tile that a warp holds in registers.
struct HeldTile {
  Step steps[K_TILE / STEP_K];

  DISTMK_FN void clear() {
#pragma unroll
    for (Step& step : steps)
#pragma unroll
      for (auto& product : step)
#pragma unroll
        for (uint32_t& pair : product) pair = 0;
  }
  DISTMK_FN void load(const char* stage, const Lane& lane) {
    const uint32_t row = shared_address(stage) + lane.row * K_TILE * 2;
#pragma unroll
    for (uint32_t i = 0; i < K_TILE / STEP_K; ++i) load_step(row, i * STEP_K, lane, steps[i]);
  }
  DISTMK_FN void multiply(const Column<1>& x, float (&sums)[1][4]) const {
    float odd[1][4] = {};
#pragma unroll
    for (uint32_t i = 0; i < K_TILE / STEP_K; ++i) multiply_step<1>(steps[i], x, i, sums, odd);
    add_sums<1>(odd, sums);
  }
};

// Adds up the squares of rows of activations for their norm, this warp's part of them: products of the rows with
// themselves, on whose diagonals they lie. Half of a chunk is taken for rows 8 to 15 of the first factor, so that the
// chunk is one as it is.
template <uint32_t N_TILES>
DISTMK_FN void add_squares(const Column<N_TILES>& x, bool first) {
#pragma unroll
  for (uint32_t tile = 0; tile < N_TILES; ++tile) {
    float upper[4] = {}, lower[4] = {};
#pragma unroll
    for (const uint4& b : x.chunks[tile]) {
      const uint32_t rows[4] = {b.x, b.y, b.z, b.w};
      multiply(rows, b.x, b.z, upper);
      multiply(rows, b.y, b.w, lower);
    }
    // Lane 4 g + t has of row g columns 2 t and 2 t + 1.
    const uint32_t thread = opaque(threadIdx.x), row = thread % 32 / 4;  // or where they go would lie on the stack
    if (thread % 4 != row / 2) continue;
    float& squares = shared().squares[tile * N_TILE + row][thread / 32];
    const float sum = row % 2 ? upper[1] + lower[3] : upper[0] + lower[2];
    squares = first ? sum : squares + sum;
  }
}

}  // namespace linear
}  // namespace distmk
