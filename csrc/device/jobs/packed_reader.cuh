// Readers of packed tiles in the mainloop of a GEMM in jobs (mainloop.cuh). Weights are decoded to bf16 in registers,
// while the products of earlier ones run. Activations have the order of lanes (lane_order() of runtime/job_batch.h), as
// a lane has eight consecutive columns of every 32.
#pragma once
#ifdef DISTMK_PACKED
#include "device/formats/all.cuh"
#include "device/jobs/mainloop.cuh"

namespace distmk {
namespace jobs {

static_assert(linear::BLOCK_COLS == ACTIVATION_BLOCK_COLS, "");

// The weights of a block, by halves.
struct BlockFragments {
  WeightFragments first, second;
};

// Reads tiles of format F. Their rows are in natural order, and every K tile has K_TILE columns.
template <class F>
class PackedReader : public TilePosition {
 public:
  using Loaded = BlockFragments;

  DISTMK_FN static uint32_t fragment_row(uint32_t lane) { return lane / 4; }

  using TilePosition::TilePosition;
  // Writes the factors of a job's sums, one row per thread. They are read behind the next barrier of all consumers.
  DISTMK_FN static void write_factors(const LinearJobsArgs& args, const JobPlan& job) {
    const uint32_t row = threadIdx.x, tile = row / M_TILE;
    if (tile >= job.num_tiles) return;
    const uint32_t num_rows = job.tiles[tile].features.count * (is_paired(args) ? 2 : 1);
    const bool is_scaled = job.of_tile[tile] && row % M_TILE < num_rows;
    rings().of_row[row] = (args.scale ? args.scale : 1.0f) * (is_scaled ? job.of_tile[tile][row % M_TILE] : 1.0f);
  }
  // Multiplies the sums of M tile `tile`.
  template <uint32_t COUNT>
  DISTMK_FN static void multiply_by_factors(float (&acc)[COUNT], uint32_t tile) {
    const float* of_tile = rings().of_row + tile * M_TILE + fragment_row(threadIdx.x % 32);
    const float upper = of_tile[0], lower = of_tile[M_TILE / 2];
#pragma unroll
    for (uint32_t i = 0; i < COUNT; ++i) acc[i] *= i % 4 < 2 ? upper : lower;
  }

  DISTMK_FN void open(uint32_t, uint32_t first) {
    await();
    tile_ = tile();
    block_ = first;
  }
  // Loads and decodes a whole block, because decoding takes as long as the products of half a block.
  DISTMK_FN Loaded load() const {
    const BlockRow upper(linear::TileRow<F>(tile_, false), block_), lower(linear::TileRow<F>(tile_, true), block_);
    return {{upper.decode(0), lower.decode(0)}, {upper.decode(1), lower.decode(1)}};
  }
  DISTMK_FN void move_on(uint32_t step) { block_ += step; }

 private:
  using BlockRow = typename F::BlockRow;
  static_assert(M_TILE * F::Constants::TILE_ROW_BYTES + F::Constants::TILE_SCALE_BYTES <= A_TILE_BYTES, "");

  uint32_t tile_, block_;
};

template <uint32_t N, class F>
DISTMK_FN void multiply_block(float (&acc)[N / 2], PackedReader<F>& weights, const BlockFragments& w, uint32_t b_slot,
                              uint32_t step) {
  multiply_half<N>(acc, w.first, b_slot, 0);
  multiply_half<N>(acc, w.second, b_slot, 1);
  weights.move_on(step);
}

}  // namespace jobs
}  // namespace distmk
#endif  // DISTMK_PACKED
