// Mainloop of linear layers with packed weights: C[m, n] = sum over k of W[m, k] X[n, k], as in mainloop.cuh, with
// tiles that a format decodes (device/formats). A stage of the pipeline has up to TILES_PER_STAGE tiles of the format.
#pragma once
#ifdef DISTMK_PACKED
#include "device/formats/packed_inputs.cuh"

namespace distmk {
namespace linear {

// The accumulators of this lane for an M block, in shared memory: registers cannot be indexed by a variable, and two N
// tiles of activations leave too few.
template <uint32_t N_TILES>
class SharedAccumulators {
 public:
  DISTMK_FN explicit SharedAccumulators(float4* all) : own_(all + opaque(threadIdx.x)) {}
  DISTMK_FN void load(uint32_t m_tile, MTileAccumulators<N_TILES>& acc) const {
#pragma unroll
    for (uint32_t n = 0; n < N_TILES; ++n) {
      const float4 v = own_[(m_tile * N_TILES + n) * NUM_CONSUMERS];
      acc[n][0] = v.x, acc[n][1] = v.y, acc[n][2] = v.z, acc[n][3] = v.w;
    }
  }
  DISTMK_FN void load(Accumulators<N_TILES>& acc) const {
#pragma unroll
    for (uint32_t m = 0; m < M_TILES_PER_BLOCK; ++m) load(m, acc[m]);
  }
  DISTMK_FN void store(uint32_t m_tile, const MTileAccumulators<N_TILES>& acc) const {
#pragma unroll
    for (uint32_t n = 0; n < N_TILES; ++n)
      own_[(m_tile * N_TILES + n) * NUM_CONSUMERS] = float4{acc[n][0], acc[n][1], acc[n][2], acc[n][3]};
  }

 private:
  float4* own_;
};

// Multiplies this warp's K tile of a K block of `block_k` columns: all M tiles of `m_block`, the first of which begins
// in stage `read`. In the first K block of an M block the accumulators begin at 0.
template <class F, uint32_t N_TILES>
DISTMK_FN void packed_k_block(const FragmentB<N_TILES>& x, const MBlock& m_block, bool is_first, uint32_t block_k,
                              PipelineState<NUM_STAGES>& read, const SharedAccumulators<N_TILES>& accumulators) {
  using C = typename F::Constants;
  const PackedLane<F> lane;
  typename F::template Prepared<N_TILES> prepared;
  F::prepare(x, prepared);
  constexpr uint32_t TILES = C::TILES_PER_STAGE;
  static_assert(K_TILES_PER_BLOCK % TILES == 0, "a K block is whole stages");
  static_assert(TILES * (M_TILE * C::TILE_ROW_BYTES + C::TILE_SCALE_BYTES) <= STAGE_BYTES, "the tiles of a stage");
  const uint32_t num_rows = m_block.end - m_block.begin, num_stages = (block_k + TILES * K_TILE - 1) / (TILES * K_TILE);
  const uint32_t warp = own_warp(), tile = warp % TILES;
  const bool has_tile = own_k_begin() < block_k, is_last = own_k_begin() + K_TILE >= block_k;
#pragma unroll 1
  for (uint32_t m_tile = 0; m_tile * M_TILE < num_rows; ++m_tile, read = read.advanced(num_stages)) {
    MTileAccumulators<N_TILES> acc = {};
    if (has_tile) {
      const PipelineState<NUM_STAGES> stage = read.advanced(warp / TILES);
      const uint32_t tile_bytes = min(M_TILE, num_rows - m_tile * M_TILE) * C::TILE_ROW_BYTES + C::TILE_SCALE_BYTES;
      consumer_wait(stage);
      const char* from = shared().at<Overlay::PIPELINE_STAGES>() + stage.index * STAGE_BYTES + tile * tile_bytes;
      F::template multiply<N_TILES>(PackedTile<F>(from, lane), x, prepared, acc);
      // The warp with a stage's last tile also arrives for the missing tiles.
      warp_arrive(&shared().pipeline.empty[stage.index], (is_last ? TILES - tile : 1) * (ARRIVALS_PER_STAGE / TILES));
    }
    if (!is_first) {  // here, because the product leaves no registers for it
      MTileAccumulators<N_TILES> before;
      accumulators.load(m_tile, before);
      add_accumulators<N_TILES>(before, acc);
    }
    accumulators.store(m_tile, acc);
  }
}

// The same for a format that is known when the kernel runs. Only this much of a task exists once for every format:
// activations are ready, and accumulators are in shared memory, so a branch for each K block costs next to nothing.
template <uint32_t N_TILES>
DISTMK_FN void multiply_block(uint32_t format, const FragmentB<N_TILES>& x, const MBlock& m_block, bool is_first,
                              uint32_t block_k, PipelineState<NUM_STAGES>& read,
                              const SharedAccumulators<N_TILES>& accumulators) {
  switch (format) {
#define DISTMK_CASE(Name)                                                                    \
  case Name##Format::ID:                                                                     \
    packed_k_block<Name##Tiles, N_TILES>(x, m_block, is_first, block_k, read, accumulators); \
    break;
    DISTMK_PACKED_FORMATS(DISTMK_CASE)
#undef DISTMK_CASE
  }
}

}  // namespace linear
}  // namespace distmk
#endif  // DISTMK_PACKED
