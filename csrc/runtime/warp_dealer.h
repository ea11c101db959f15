// How the warps of a worker share its row jobs of attention (device/jobs/row_jobs.cuh).
#pragma once
#include "platform/platform.h"

namespace distmk {

// Deals a worker's jobs to warps in their order, so that no warp has more than `most_tiles`. A job with more tiles is
// cut into as few pieces as possible. A warp with other jobs has as many as fit.
class WarpDealer {
 public:
  // Values to try for `most_tiles`, in ascending order: from the mean, in steps of an eighth of it. The last one is
  // enough for any jobs. T tiles, up to n a warp, take at most 3 T / n + 1 warps, and its n is nearly five times the
  // mean.
  static constexpr uint32_t NUM_TRIES = 32;
  DISTMK_FN static uint32_t try_most_tiles(uint32_t num_tiles, uint32_t num_warps, uint32_t i) {
    const uint32_t mean = (num_tiles + num_warps - 1) / num_warps;
    return mean + mean * i / 8;
  }

  uint32_t warp = 0;        // the latest job's first warp
  uint32_t num_pieces = 0;  // the latest job's pieces

  DISTMK_FN explicit WarpDealer(uint32_t most_tiles) : most_tiles_(most_tiles) {}
  // Deals a job of `num_tiles`, at least 1.
  DISTMK_FN void deal(uint32_t num_tiles) {
    if (num_tiles <= room_) {
      room_ -= num_tiles;
      return;
    }
    warp += num_pieces;
    num_pieces = (num_tiles + most_tiles_ - 1) / most_tiles_;
    room_ = num_pieces == 1 ? most_tiles_ - num_tiles : 0;
  }
  // The number of warps with jobs.
  DISTMK_FN uint32_t num_warps() const { return warp + num_pieces; }
  // The number of tiles that the latest job's warp can still take.
  DISTMK_FN uint32_t room() const { return room_; }

 private:
  uint32_t most_tiles_, room_ = 0;
};

}  // namespace distmk
