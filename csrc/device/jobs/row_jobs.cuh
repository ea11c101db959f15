// Row jobs of attention (attention_rows.cuh): one KV head and all queries of a short run, mostly of one decoding row. A
// worker's jobs are divided among its warps. A short job goes to one warp as a whole, which then needs nobody. A long
// job is cut into pieces of consecutive tiles, and each piece has a warp of its own.
#pragma once
#include "device/jobs/attention_plan.cuh"
#include "runtime/warp_dealer.h"

namespace distmk {
namespace jobs {

constexpr uint32_t ROW_TILE = 16;  // positions of a tile

struct RowJob {
  BatchRun run;
  uint32_t kv_head, first_head, num_heads;  // query heads of this rank that share the KV head
  uint32_t begin = 0, end = 0;              // its positions; the first is a multiple of ROW_TILE

  DISTMK_FN uint32_t num_queries() const { return static_cast<uint32_t>(run.num_rows) * num_heads; }
  DISTMK_FN uint32_t num_tiles() const { return (end - begin + ROW_TILE - 1) / ROW_TILE; }
  // Position of the run's first row. Earlier positions are in the caches when the iteration begins.
  DISTMK_FN uint32_t first_new() const { return static_cast<uint32_t>(run.kv_len - run.num_rows); }

  // Finds the row job in a round of this worker. False: there are no more jobs. A round without a row job has no tiles.
  DISTMK_FN bool find(uint32_t round) {
    const AttentionPlan& plan = attention_plan();
    const AttentionSchedule& schedule = attention_schedule();
    const uint32_t index = plan.job_of_round(round);
    begin = end = 0;
    if (index >= schedule.num_jobs) return false;
    if (index < schedule.num_block_jobs) return true;
    const uint32_t row_job = index - schedule.num_block_jobs, row_run = row_job / plan.args.num_kv;
    kv_head = row_job - row_run * plan.args.num_kv;
    const QueryHeads<> heads(plan.args, kv_head);
    if (!heads.num) return true;
    run = schedule.runs[schedule.num_block_runs + row_run];
    first_head = heads.first, num_heads = heads.num;
    begin = first_seen(plan.args.window, first_new()) / ROW_TILE * ROW_TILE;
    end = static_cast<uint32_t>(run.kv_len);
    return true;
  }
};

// What a warp attends: some jobs, or a piece of one.
class WarpShare {
 public:
  RowJob job;
  uint32_t begin = 0, end = 0;              // the positions of the job that this warp takes
  uint32_t first_warp = 0, num_pieces = 1;  // the warps that share the job

  // All lanes of the warp construct it together.
  DISTMK_FN WarpShare() {
    const uint32_t warp = threadIdx.x / 32;
    WarpDealer dealer(fewest_tiles());
    for_each_job([&](uint32_t round, uint32_t num_tiles) {
      dealer.deal(num_tiles);
      if (has_job_ || warp - dealer.warp >= dealer.num_pieces) return;
      has_job_ = true, round_ = round;
      first_warp = dealer.warp, num_pieces = dealer.num_pieces;
      room_ = dealer.room() + num_tiles;
    });
    if (num_pieces > 1) job.find(round_);
  }
  // Moves on to the next job. False: there is none.
  DISTMK_FN bool next() {
    if (!has_job_) return false;
    if (num_pieces > 1) {
      const uint32_t piece = threadIdx.x / 32 - first_warp, num_tiles = job.num_tiles();
      begin = job.begin + num_tiles * piece / num_pieces * ROW_TILE;
      end = min(job.begin + num_tiles * (piece + 1) / num_pieces * ROW_TILE, job.end);
      has_job_ = false;
      return true;
    }
    for (; job.find(round_); ++round_) {
      const uint32_t num_tiles = job.num_tiles();
      if (!num_tiles) continue;
      if (num_tiles > room_) break;
      room_ -= num_tiles, ++round_;
      begin = job.begin, end = job.end;
      return true;
    }
    return has_job_ = false;
  }

 private:
  uint32_t round_ = 0;
  uint32_t room_ = 0;  // tiles that the warp can still take
  bool has_job_ = false;

  // Calls visit(round, number of tiles) for each of the worker's jobs, in all lanes.
  template <class Visit>
  DISTMK_FN static void for_each_job(const Visit& visit) {
    uint32_t num_found = 32;
#pragma unroll 1
    for (uint32_t first = 0; num_found == 32; first += 32) {
      RowJob of_lane;
      num_found = count_bits(__ballot_sync(~0u, of_lane.find(first + threadIdx.x % 32)));
#pragma unroll 1
      for (uint32_t i = 0; i < num_found; ++i) {
        const uint32_t num_tiles = __shfl_sync(~0u, of_lane.num_tiles(), i);
        if (num_tiles) visit(first + i, num_tiles);
      }
    }
  }
  // The most tiles of a warp, as few as possible. Every lane tries another number.
  DISTMK_FN static uint32_t fewest_tiles() {
    static_assert(WarpDealer::NUM_TRIES == 32, "one for each lane");
    uint32_t total = 0;
    for_each_job([&](uint32_t, uint32_t num_tiles) { total += num_tiles; });
    const uint32_t most_tiles = WarpDealer::try_most_tiles(total, NUM_WARPS, threadIdx.x % 32);
    WarpDealer dealer(most_tiles);
    for_each_job([&](uint32_t, uint32_t num_tiles) { dealer.deal(num_tiles); });
    const uint32_t fitting = __ballot_sync(~0u, dealer.num_warps() <= NUM_WARPS);
    return __shfl_sync(~0u, most_tiles, __ffs(static_cast<int>(fitting)) - 1);
  }
};

}  // namespace jobs
}  // namespace distmk
