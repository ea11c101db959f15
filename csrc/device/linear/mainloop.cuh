// Mainloop of linear layers on tensor cores: C[m, n] = sum over k of W[m, k] X[n, k], with W and X in bf16 and C in
// float32. W streams through the pipeline in shared memory, X is in registers (activations.cuh), C goes to the
// epilogue.
//   m: weight rows of the slab; a block is M_BLOCK = 64 rows, four M tiles of 16.
//   n: tokens, in N_TILES tiles of 8. Up to eight tokens cost little more than one.
//   k: columns; a block is K_BLOCK = 2048 columns, one K_TILE = 256 per warp: split-K within the CTA.
// W is packed in the order in which it is multiplied: M blocks, K blocks, M tiles, K tiles (distmk/formats/tiles.py).
#pragma once
#include "device/linear/activations.cuh"

namespace distmk {
namespace linear {

static_assert(NUM_WARPS == K_TILES_PER_BLOCK, "a warp multiplies one K tile of each K block");

struct MBlock {
  uint32_t begin, end;  // weight rows of the slab
};

// mma.m16n8k16: lane 4 g + t holds rows g and g + 8 of tokens 2 t and 2 t + 1.
template <uint32_t N_TILES>
using MTileAccumulators = float[N_TILES][4];
template <uint32_t N_TILES>
using Accumulators = MTileAccumulators<N_TILES>[M_TILES_PER_BLOCK];

constexpr uint32_t MMA_K = 16;
constexpr uint32_t FRAGMENT_K = 64;  // weight columns whose products are in flight together
using FragmentA = uint32_t[FRAGMENT_K / MMA_K][4];

// The row of a weight tile that this lane addresses for ldmatrix, and the byte offsets of its 16-byte chunks in the
// four k16 steps of a fragment. Tiles are XOR-swizzled: chunk c of row r lies at c ^ (r % 8).
struct LdmatrixLane {
  uint32_t row, chunk[FRAGMENT_K / MMA_K];

  DISTMK_FN LdmatrixLane() {
    const uint32_t lane = opaque(threadIdx.x % 32);  // else the compiler would compute all this anew for every tile
    row = lane % 16;
#pragma unroll
    for (uint32_t i = 0; i < FRAGMENT_K / MMA_K; ++i) chunk[i] = ((2 * i + lane / 16) ^ (row % 8)) * 16;
  }
  // Shared address of this lane's row in a tile of `tile_k` columns.
  DISTMK_FN uint32_t row_address(const char* tile, uint32_t tile_k) const {
    return shared_address(tile) + row * tile_k * 2;
  }
};

DISTMK_FN void load_fragment_a(uint32_t row_address, uint32_t k, const LdmatrixLane& lane, FragmentA& a) {
#pragma unroll
  for (uint32_t i = 0; i < FRAGMENT_K / MMA_K; ++i) ldmatrix_x4(row_address + k * 2 + lane.chunk[i], a[i]);
}

// Multiplies fragment `f` of a K tile. Two accumulators alternate, because an mma waits for the previous one into the
// same accumulator.
template <uint32_t N_TILES>
DISTMK_FN void mma_fragment(const FragmentA& a, const FragmentB<N_TILES>& b, uint32_t f,
                            MTileAccumulators<N_TILES>& even, MTileAccumulators<N_TILES>& odd) {
  static_assert(FRAGMENT_K == 2 * LOAD_K, "");
#pragma unroll
  for (uint32_t n = 0; n < N_TILES; ++n)
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const uint4& chunk = b.chunks[n][2 * f + i];
      multiply(a[2 * i], chunk.x, chunk.y, even[n]);
      multiply(a[2 * i + 1], chunk.z, chunk.w, odd[n]);
    }
}

template <uint32_t N_TILES>
DISTMK_FN void add_accumulators(const MTileAccumulators<N_TILES>& from, MTileAccumulators<N_TILES>& acc) {
#pragma unroll
  for (uint32_t n = 0; n < N_TILES; ++n)
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) acc[n][i] += from[n][i];
}

// Multiplies one tile of `tile_k` columns in a pipeline stage. A whole tile takes no branches: they would keep a
// fragment's loads from running ahead of the previous fragment's products.
template <uint32_t N_TILES>
DISTMK_FN void mma_tile(const char* tile, uint32_t tile_k, const FragmentB<N_TILES>& b, const LdmatrixLane& lane,
                        MTileAccumulators<N_TILES>& acc) {
  const uint32_t row_address = lane.row_address(tile, tile_k);
  MTileAccumulators<N_TILES> odd = {};
  const auto mma_step = [&](uint32_t f) {
    FragmentA a;
    load_fragment_a(row_address, f * FRAGMENT_K, lane, a);
    mma_fragment<N_TILES>(a, b, f, acc, odd);
  };
  if (tile_k == K_TILE) {
#pragma unroll
    for (uint32_t f = 0; f < K_TILE / FRAGMENT_K; ++f) mma_step(f);
  } else {
#pragma unroll
    for (uint32_t f = 0; f < K_TILE / FRAGMENT_K; ++f)
      if (f * FRAGMENT_K < tile_k) mma_step(f);
  }
  add_accumulators<N_TILES>(odd, acc);
}

// One M tile of a K block takes several stages. This warp's K tile is tile warp_tile() of stage warp_stage() among
// them.
DISTMK_FN uint32_t stages_per_m_tile(uint32_t block_k) { return (block_k + STAGE_K - 1) / STAGE_K; }
DISTMK_FN uint32_t warp_stage() { return own_thread() / 32 / K_TILES_PER_STAGE; }
DISTMK_FN uint32_t warp_tile() { return own_warp() % K_TILES_PER_STAGE; }
static_assert(K_BLOCK / STAGE_K <= PipelineState<NUM_STAGES>::MOST_STEPS, "stages of an M tile");

DISTMK_FN const char* tile_of(const PipelineState<NUM_STAGES>& stage, uint32_t tile_rows) {
  return shared().at<Overlay::PIPELINE_STAGES>() + stage.index * STAGE_BYTES +
         warp_tile() * Weights::bytes(K_TILE * tile_rows);
}

DISTMK_FN void consumer_wait(const PipelineState<NUM_STAGES>& stage) {
  barrier_wait(&shared().pipeline.full[stage.index], stage.phase);
}
// If a stage is not full, the warp with its last tile also arrives for the missing tiles.
DISTMK_FN void consumer_release(const PipelineState<NUM_STAGES>& stage, uint32_t block_k) {
  const bool last = warp_k_begin() + K_TILE >= block_k;
  warp_arrive(&shared().pipeline.empty[stage.index], (last ? K_TILES_PER_STAGE - warp_tile() : 1) * ARRIVALS_PER_TILE);
}

// acc[m_tile] += tile. Registers cannot be indexed by a variable. Comparing with each M tile takes half as many
// instructions as adding zeros to the others.
template <uint32_t N_TILES>
DISTMK_FN void add_to_m_tile(const MTileAccumulators<N_TILES>& tile, uint32_t m_tile, Accumulators<N_TILES>& acc) {
#pragma unroll
  for (uint32_t m = 0; m < M_TILES_PER_BLOCK; ++m)
#pragma unroll
    for (uint32_t n = 0; n < N_TILES; ++n)
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i)
        if (m == m_tile) acc[m][n][i] += tile[n][i];
}

// Multiplies this warp's K tile of a K block of `block_k` columns: the M tiles of `m_block` from `m_tile` on. The first
// of them begins in stage `read`.
template <uint32_t N_TILES>
DISTMK_FN void mainloop_k_block(const FragmentB<N_TILES>& b, const LdmatrixLane& lane, const MBlock& m_block,
                                uint32_t block_k, uint32_t m_tile, PipelineState<NUM_STAGES>& read,
                                Accumulators<N_TILES>& acc) {
  const uint32_t num_rows = m_block.end - m_block.begin, num_stages = stages_per_m_tile(block_k);
#pragma unroll 1
  for (; m_tile * M_TILE < num_rows; ++m_tile, read = read.advanced(num_stages)) {
    if (warp_k_begin() >= block_k) continue;
    const PipelineState<NUM_STAGES> stage = read.advanced(warp_stage());
    MTileAccumulators<N_TILES> tile_acc = {};
    consumer_wait(stage);
    mma_tile<N_TILES>(tile_of(stage, min(M_TILE, num_rows - m_tile * M_TILE)), min(K_TILE, block_k - warp_k_begin()), b,
                      lane, tile_acc);
    consumer_release(stage, block_k);
    add_to_m_tile<N_TILES>(tile_acc, m_tile, acc);
  }
}

// Prefetched A fragments: the slab's first M tile in its first K block, loaded into registers while the task still
// waits for its activations. That frees the tile's stages for the loader. Only a block whose K tiles are all whole is
// prefetched.
struct PrefetchedA {
  FragmentA fragments[K_TILE / FRAGMENT_K];
  uint32_t num_m_tiles = 0;  // M tiles taken from the pipeline, the same in all warps

  DISTMK_FN void load(const LinearArgs& args, uint32_t slab_rows, PipelineState<NUM_STAGES>& read,
                      const LdmatrixLane& lane) {
    const uint32_t block_k = min(K_BLOCK, args.k_pitch);
    num_m_tiles = block_k % K_TILE == 0;
    if (!num_m_tiles || warp_k_begin() >= block_k) {
      clear();
    } else {
      const PipelineState<NUM_STAGES> stage = read.advanced(warp_stage());
      consumer_wait(stage);
      const uint32_t row_address = lane.row_address(tile_of(stage, min(M_TILE, slab_rows)), K_TILE);
#pragma unroll
      for (uint32_t f = 0; f < K_TILE / FRAGMENT_K; ++f)
        load_fragment_a(row_address, f * FRAGMENT_K, lane, fragments[f]);
      consumer_release(stage, block_k);
    }
    if (num_m_tiles) read = read.advanced(stages_per_m_tile(block_k));
  }

  // Adds nothing if nothing was loaded.
  DISTMK_FN void multiply(const FragmentB<1>& b, Accumulators<1>& acc) const {
    MTileAccumulators<1> odd = {};
#pragma unroll
    for (uint32_t f = 0; f < K_TILE / FRAGMENT_K; ++f) mma_fragment<1>(fragments[f], b, f, acc[0], odd);
    add_accumulators<1>(odd, acc[0]);
  }

 private:
  // Undefined registers would be kept alive through all other tasks.
  DISTMK_FN void clear() {
#pragma unroll
    for (FragmentA& fragment : fragments)
#pragma unroll
      for (auto& step : fragment)
#pragma unroll
        for (uint32_t& pair : step) pair = 0;
  }
};

// For RMSNorm: each token's sum of squares over this warp's K tile, the diagonal of X X^T. A chunk serves as an A
// fragment unchanged. Its registers 1 and 3 then stand in rows 8 to 15, so their part of the diagonal is in `lower`.
template <uint32_t N_TILES>
DISTMK_FN void add_squares(const FragmentB<N_TILES>& b, bool first) {
#pragma unroll
  for (uint32_t n = 0; n < N_TILES; ++n) {
    float upper[4] = {}, lower[4] = {};
#pragma unroll
    for (const uint4& chunk : b.chunks[n]) {
      const uint32_t a[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
      multiply(a, chunk.x, chunk.z, upper);
      multiply(a, chunk.y, chunk.w, lower);
    }
    // Lane 4 g + t has columns 2 t and 2 t + 1 of row g. opaque() keeps the addresses off the stack.
    const uint32_t thread = opaque(threadIdx.x), token = thread % 32 / 4;
    if (thread % 4 != token / 2) continue;
    float& squares = shared().squares[n * N_TILE + token][thread / 32];
    const float sum = token % 2 ? upper[1] + lower[3] : upper[0] + lower[2];
    squares = first ? sum : squares + sum;
  }
}

}  // namespace linear
}  // namespace distmk
