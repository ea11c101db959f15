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

// Reads tiles of format F. Their rows are in natural order, and every K tile has K_TILE columns.
template <class F>
class PackedReader : public TilePosition {
 public:
  DISTMK_FN static uint32_t fragment_row(uint32_t lane) { return lane / 4; }

  using TilePosition::TilePosition;
  DISTMK_FN void open(uint32_t, uint32_t first) {
    await();
    tile_ = tile();
    block_ = first;
  }
  DISTMK_FN WeightFragments load_first_half() {
    upper_ = BlockRow(linear::TileRow<F>(tile_, false), block_);
    lower_ = BlockRow(linear::TileRow<F>(tile_, true), block_);
    return {upper_.decode(0), lower_.decode(0)};
  }
  // Also moves on by `step` blocks.
  DISTMK_FN WeightFragments load_second_half(uint32_t step) {
    block_ += step;
    return {upper_.decode(1), lower_.decode(1)};
  }

 private:
  using BlockRow = typename F::BlockRow;
  static_assert(M_TILE * F::Constants::TILE_ROW_BYTES + F::Constants::TILE_SCALE_BYTES <= A_TILE_BYTES, "");

  uint32_t tile_, block_;
  BlockRow upper_, lower_;
};

}  // namespace jobs
}  // namespace distmk
#endif  // DISTMK_PACKED
