// Rung 9: a tiled GEMM C[m, n] = A[m, k] B[k, n] with three tile schedulers. bf16 in, float32 out, all row-major; m and
// n are multiples of TILE, k of DEPTH. The mainloop is a plain double-buffered WMMA loop, a third as fast as a
// library's, because the subject is the scheduling of tiles.
#include <cuda_bf16.h>
#include <cuda_pipeline.h>
#include <mma.h>

#include "lab.cuh"

namespace wmma = nvcuda::wmma;

constexpr uint32_t TILE = 128, DEPTH = 32, NUM_THREADS = 256, PAD = 8;
constexpr uint32_t CHUNK = 8;                          // elements per 16-byte copy
constexpr uint32_t FRAGMENT = 16, ROWS = 2, COLS = 4;  // 2 x 4 fragments per warp, 4 x 2 warps per tile

struct Problem {
  const __nv_bfloat16 *a, *b;
  float* c;
  uint32_t m, n, k;

  __device__ uint32_t num_tiles() const { return (m / TILE) * (n / TILE); }
};

struct alignas(128) Stage {
  __nv_bfloat16 a[TILE][DEPTH + PAD];
  __nv_bfloat16 b[DEPTH][TILE + PAD];
};

__device__ void fetch(Stage& stage, const Problem& p, uint32_t row, uint32_t col, uint32_t depth) {
  for (uint32_t i = threadIdx.x; i < TILE * DEPTH / CHUNK; i += NUM_THREADS) {
    const uint32_t a_row = i / (DEPTH / CHUNK), a_col = i % (DEPTH / CHUNK) * CHUNK;
    __pipeline_memcpy_async(&stage.a[a_row][a_col], p.a + uint64_t{row + a_row} * p.k + depth + a_col, 16);
    const uint32_t b_row = i / (TILE / CHUNK), b_col = i % (TILE / CHUNK) * CHUNK;
    __pipeline_memcpy_async(&stage.b[b_row][b_col], p.b + uint64_t{depth + b_row} * p.n + col + b_col, 16);
  }
  __pipeline_commit();
}

__device__ void multiply(const Problem& p, uint32_t tile) {
  __shared__ Stage stages[2];
  const uint32_t row = tile / (p.n / TILE) * TILE, col = tile % (p.n / TILE) * TILE;
  const uint32_t warp = threadIdx.x / 32, warp_row = warp / 2 * (ROWS * FRAGMENT),
                 warp_col = warp % 2 * (COLS * FRAGMENT);
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> sums[ROWS][COLS];
  for (auto& of_row : sums)
    for (auto& sum : of_row) wmma::fill_fragment(sum, 0.0f);
  fetch(stages[0], p, row, col, 0);
  for (uint32_t depth = 0; depth < p.k; depth += DEPTH) {
    const Stage& stage = stages[depth / DEPTH % 2];
    if (depth + DEPTH < p.k) {
      fetch(stages[(depth / DEPTH + 1) % 2], p, row, col, depth + DEPTH);
      __pipeline_wait_prior(1);
    } else {
      __pipeline_wait_prior(0);
    }
    __syncthreads();  // all threads' copies of this stage have landed
#pragma unroll
    for (uint32_t inner = 0; inner < DEPTH; inner += FRAGMENT) {
      wmma::fragment<wmma::matrix_a, 16, 16, 16, __nv_bfloat16, wmma::row_major> a[ROWS];
      wmma::fragment<wmma::matrix_b, 16, 16, 16, __nv_bfloat16, wmma::row_major> b[COLS];
      for (uint32_t i = 0; i < ROWS; ++i)
        wmma::load_matrix_sync(a[i], &stage.a[warp_row + i * FRAGMENT][inner], DEPTH + PAD);
      for (uint32_t j = 0; j < COLS; ++j)
        wmma::load_matrix_sync(b[j], &stage.b[inner][warp_col + j * FRAGMENT], TILE + PAD);
      for (uint32_t i = 0; i < ROWS; ++i)
        for (uint32_t j = 0; j < COLS; ++j) wmma::mma_sync(sums[i][j], a[i], b[j], sums[i][j]);
    }
    __syncthreads();  // all threads have read this stage
  }
  for (uint32_t i = 0; i < ROWS; ++i)
    for (uint32_t j = 0; j < COLS; ++j) {
      float* out = p.c + uint64_t{row + warp_row + i * FRAGMENT} * p.n + col + warp_col + j * FRAGMENT;
      wmma::store_matrix_sync(out, sums[i][j], p.n, wmma::mem_row_major);
    }
}

// No scheduler: one block per tile.
extern "C" __global__ void __launch_bounds__(NUM_THREADS, 2) gemm_grid(Problem p, Stamp* stamp) {
  stamp_begin(stamp);
  multiply(p, blockIdx.x);
  stamp_end(stamp);
}

// Static scheduler: as many blocks as are resident at once. A block's tiles are gridDim.x apart.
extern "C" __global__ void __launch_bounds__(NUM_THREADS, 2) gemm_static(Problem p, Stamp* stamp) {
  stamp_begin(stamp);
  for (uint32_t tile = blockIdx.x; tile < p.num_tiles(); tile += gridDim.x) multiply(p, tile);
  stamp_end(stamp);
}

// Dynamic scheduler: as many blocks as are resident at once. A block takes its next tile from the counter `next`, which
// the host resets to 0.
extern "C" __global__ void __launch_bounds__(NUM_THREADS, 2) gemm_counter(Problem p, Stamp* stamp, uint32_t* next) {
  __shared__ uint32_t taken;
  stamp_begin(stamp);
  for (;;) {
    if (threadIdx.x == 0) taken = atomicAdd(next, 1);
    __syncthreads();
    const uint32_t tile = taken;
    __syncthreads();  // all threads have read `taken` before it is written again
    if (tile >= p.num_tiles()) break;
    multiply(p, tile);
  }
  stamp_end(stamp);
}
