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
    const uint32_t num_kv = args_.num_kv, num_workers = schedule_.num_workers;
    const uint32_t num_tiles = schedule_.number_runs(
        schedule_.num_jobs / num_kv, [&](uint32_t run) { return row_tiles(args_, schedule_.runs[run]) * num_kv; });
    const uint32_t share = max((num_tiles + num_workers - 1) / num_workers, LEAST_SHARE);
    // Jobs are dealt in order of decreasing length, back and forth. So one of these workers has the most tiles.
    const uint32_t most = max(tiles_of_worker(0), tiles_of_worker(num_workers - 1));
    // Of nearly equal loads, whole jobs divide better among a worker's warps.
    if (threadIdx.x == 0) schedule_.row_share = most > share + share / 8 + SHARING_TILES ? share : 0;
  }

 private:
  const AttentionJobsArgs& args_;
  AttentionSchedule& schedule_;

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
