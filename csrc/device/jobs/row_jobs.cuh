// Row jobs of attention (attention_rows.cuh): one KV head and all queries of a short run, mostly of one decoding row. A
// worker's jobs are divided among its warps. A short job goes to one warp as a whole, which then needs nobody. A long
// job is cut into pieces of consecutive tiles, and each piece has a warp of its own. Workers share long jobs where that
// keeps more of them busy (row_balance.cuh).
#pragma once
#include "device/jobs/row_balance.cuh"
#include "runtime/warp_dealer.h"

namespace distmk {
namespace jobs {

struct RowJob {
  BatchRun run;
  uint32_t kv_head, first_head, num_heads;  // query heads of this rank that share the KV head
  uint32_t begin = 0, end = 0;              // positions that this worker takes; the first is a multiple of ROW_TILE
  uint32_t first_worker, num_workers = 1;   // the workers that share the job

  DISTMK_FN uint32_t num_queries() const { return static_cast<uint32_t>(run.num_rows) * num_heads; }
  DISTMK_FN uint32_t num_tiles() const { return (end - begin + ROW_TILE - 1) / ROW_TILE; }
  // Position of the run's first row. Earlier positions are in the caches when the iteration begins.
  DISTMK_FN uint32_t first_new() const { return static_cast<uint32_t>(run.kv_len - run.num_rows); }

  // This worker's number among those that share the job.
  DISTMK_FN uint32_t part() const { return attention_plan().worker - first_worker; }

  // Finds the row job in a round of this worker. False: there are no more jobs. A round without a row job has no tiles.
  // SHARED: workers share jobs.
  template <bool SHARED>
  DISTMK_FN bool find(uint32_t round) {
    const AttentionPlan& plan = attention_plan();
    const AttentionSchedule& schedule = attention_schedule();
    if constexpr (SHARED) return find_shared(plan.worker * schedule.row_share, round);
    const uint32_t index = plan.job_of_round(round);
    begin = end = 0;
    if (index >= schedule.num_jobs) return false;
    if (index < schedule.num_block_jobs) return true;
    const uint32_t row_job = index - schedule.num_block_jobs, row_run = row_job / plan.args.num_kv;
    take(schedule.num_block_runs + row_run, row_job - row_run * plan.args.num_kv);
    return true;
  }
  // Where workers share jobs: finds the job with a tile of this worker, or the one that comes `further` jobs behind it.
  // False: it is not this worker's.
  DISTMK_FN bool find_shared(uint32_t tile, uint32_t further = 0) {
    const AttentionPlan& plan = attention_plan();
    const AttentionSchedule& schedule = attention_schedule();
    const uint32_t num_kv = plan.args.num_kv, num_runs = schedule.num_jobs / num_kv, share = schedule.row_share;
    uint32_t i = 0;  // the last run whose first tile is not behind `tile`
    for (uint32_t step = MAX_SEQUENCES / 2; step; step /= 2)
      if (i + step < num_runs && schedule.first_job[i + step] <= tile) i += step;
    uint32_t head = (tile - schedule.first_job[i]) / row_tiles(plan.args, schedule.runs[i]) + further;
    begin = end = 0;
    for (; head >= num_kv; head -= num_kv)
      if (++i >= num_runs) return false;
    const uint32_t num_tiles = row_tiles(plan.args, schedule.runs[i]);
    const uint32_t first = schedule.first_job[i] + head * num_tiles, behind = (plan.worker + 1) * share;
    if (first >= behind) return false;
    take(i, head);
    if (!num_heads) return true;
    const uint32_t before = max(first, plan.worker * share) - first;
    end = min(begin + (min(first + num_tiles, behind) - first) * ROW_TILE, end);
    begin += before * ROW_TILE;
    first_worker = first / share;
    num_workers = (first + num_tiles - 1) / share - first_worker + 1;
    return true;
  }
  // Finds the job that this worker shares with earlier workers (border 0), or that begins here and ends at later ones
  // (border 1). False: there is none.
  DISTMK_FN bool find_at_border(uint32_t border) {
    const uint32_t share = attention_schedule().row_share, first = attention_plan().worker * share;
    if (!find_shared(border ? first + share - 1 : first) || num_workers == 1) return false;
    return border ? part() == 0 : part() > 0;
  }

 private:
  // All positions of a run and a KV head; none if this rank has no queries for them.
  DISTMK_FN void take(uint32_t i, uint32_t head) {
    const AttentionPlan& plan = attention_plan();
    const QueryHeads<> heads(plan.args, head);
    kv_head = head, first_head = heads.first, num_heads = heads.num;
    if (!heads.num) return;
    run = attention_schedule().runs[i];
    begin = first_seen(plan.args.window, first_new()) / ROW_TILE * ROW_TILE;
    end = static_cast<uint32_t>(run.kv_len);
  }
};

// What a warp attends: some jobs, or a piece of one.
template <bool SHARED>
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
    if (num_pieces > 1) job.template find<SHARED>(round_);
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
    for (; job.template find<SHARED>(round_); ++round_) {
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
      num_found = count_bits(__ballot_sync(~0u, of_lane.template find<SHARED>(first + threadIdx.x % 32)));
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
