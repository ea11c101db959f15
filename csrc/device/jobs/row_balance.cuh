// Whether workers share row jobs of attention (row_jobs.cuh). Whole jobs leave most workers idle where a few sequences
// are long, or where there are slightly more jobs than workers. Then each worker takes an equal share of all tiles, and
// jobs on a border are combined from their workers' partials (row_shares.cuh).
#pragma once
#include "device/jobs/attention_plan.cuh"

namespace distmk {
namespace jobs {

#ifdef DISTMK_EMULATED
constexpr uint32_t SHARING_TILES = 1, LEAST_SHARE = 2;  // few, so that tests with short sequences share
#else
// Tiles of a worker that must be saved for partials to pay (J43 in EXPERIMENTS.md), and the fewest worth a worker.
constexpr uint32_t SHARING_TILES = 96, LEAST_SHARE = 8;
#endif

// Tiles of a run and a KV head.
DISTMK_FN uint32_t row_tiles(const AttentionJobsArgs& args, const BatchRun& run) {
  const uint32_t begin = first_seen(args.window, static_cast<uint32_t>(run.kv_len - run.num_rows)) / ROW_TILE;
  return (static_cast<uint32_t>(run.kv_len) + ROW_TILE - 1) / ROW_TILE - begin;
}

// One warp uses it, for an iteration without block jobs.
class RowBalance {
 public:
  DISTMK_FN explicit RowBalance(const AttentionJobsArgs& args) : args_(args), schedule_(attention_schedule()) {}

  // Decides whether workers share jobs, and if so, numbers the tiles of all runs.
  DISTMK_FN void share_row_jobs() const {
    const uint32_t num_tiles = number_tiles(), num_workers = schedule_.num_workers;
    const uint32_t share = max((num_tiles + num_workers - 1) / num_workers, LEAST_SHARE);
    // Jobs are dealt in order of decreasing length, back and forth. So one of these workers has the most tiles.
    const uint32_t most = max(tiles_of_worker(0), tiles_of_worker(num_workers - 1));
    // Of nearly equal loads, whole jobs divide better among a worker's warps.
    if (threadIdx.x == 0) schedule_.row_share = most > share + share / 8 + SHARING_TILES ? share : 0;
  }

 private:
  const AttentionJobsArgs& args_;
  AttentionSchedule& schedule_;

  DISTMK_FN uint32_t num_runs() const { return schedule_.num_jobs / args_.num_kv; }
  // Returns the number of all tiles. Each lane has consecutive runs.
  DISTMK_FN uint32_t number_tiles() const {
    constexpr uint32_t PER_LANE = MAX_SEQUENCES / 32;
    const uint32_t first = threadIdx.x * PER_LANE;
    uint32_t count[PER_LANE], sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < PER_LANE; ++i)
      sum += count[i] = first + i < num_runs() ? row_tiles(args_, schedule_.runs[first + i]) * args_.num_kv : 0;
    uint32_t end = sum;
#pragma unroll
    for (uint32_t step = 1; step < 32; step *= 2) {
      const uint32_t before = __shfl_up_sync(~0u, end, step);
      if (threadIdx.x >= step) end += before;
    }
    uint32_t next = end - sum;
#pragma unroll
    for (uint32_t i = 0; i < PER_LANE; ++i) {
      schedule_.first_job[first + i] = next;
      next += count[i];
    }
    return __shfl_sync(~0u, end, 31);
  }
  // Tiles of the whole jobs that would be dealt to a worker.
  DISTMK_FN uint32_t tiles_of_worker(uint32_t worker) const {
    uint32_t sum = 0;
    for (uint32_t round = threadIdx.x; round * schedule_.num_workers < schedule_.num_jobs; round += 32) {
      const uint32_t job = schedule_.job_of_round(worker, round);
      if (job < schedule_.num_jobs) sum += row_tiles(args_, schedule_.runs[job / args_.num_kv]);
    }
    return __reduce_add_sync(~0u, sum);
  }
};

}  // namespace jobs
}  // namespace distmk
