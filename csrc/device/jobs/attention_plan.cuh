// The state of an `attention_jobs` task that all warps of a worker share. It is in shared memory, because no registers
// are left for it.
#pragma once
#include "device/jobs/rings.cuh"
#include "device/jobs/runs.cuh"
#include "runtime/log_sum_exp.h"

namespace distmk {
namespace jobs {

constexpr uint32_t KV_ROWS = 64;                   // positions of a block job's KV tile
constexpr uint32_t ROW_TILE = 16;                  // positions of a row job's KV tile
constexpr uint32_t ROW_QUERIES = ROW_JOB_QUERIES;  // queries of a row job at most

// A block job: a block of queries from a run that has many, and one KV head (attention_block.cuh).
struct AttentionJob {
  BatchRun run;
  uint32_t kv_head, first_head, num_heads;  // query heads of this rank that share the KV head
  uint32_t first_query;                     // numbered row * num_heads + head
  uint32_t first_position;                  // start of its first KV tile; a job's positions count from there
};

// Partials of a row job, one per warp (attention_rows.cuh).
struct RowPartials {
  LogSumExp<Base2> softmax[NUM_WARPS][ROW_QUERIES];
  uint32_t accumulators[NUM_WARPS];  // their offsets in the stages, in bytes
  uint32_t comes_last[2];            // whether all workers have left their partials of a shared job (row_shares.cuh)
};

// The part of the state that follows from the batch, and from the window. It is the same in all layers of an iteration
// with the same window, so the first attention task makes it for the others. No other phase overwrites it
// (core/overlays.cuh), except sampling, which comes after the last layer. Shared::attention_schedule says whether it is
// there.
struct AttentionSchedule {
  // The arguments from which the schedule is made, beside the iteration.
  struct Source {
    uint64_t batch;
    uint32_t num_q, num_kv, head_dim, group;
  };
  // Runs with block jobs, then runs with row jobs, each in order of decreasing positions.
  alignas(16) BatchRun runs[MAX_SEQUENCES];
  uint32_t first_job[MAX_SEQUENCES];  // each block run's first job; if row_share, each row run's first tile
  uint32_t num_block_runs, num_block_jobs, num_jobs, num_workers;
  uint32_t job_queries;  // queries of a block job at most
  // The tiles of row jobs, of all runs and KV heads one after another, of which a worker takes this many. 0: a worker
  // takes whole jobs.
  uint32_t row_share;
  uint32_t window;  // on which the tiles depend
  Source source;

  // Number of a worker's job in a round; it exists if it is below num_jobs. Jobs get shorter with their number, so they
  // are dealt from the first worker to the last and then back.
  DISTMK_FN uint32_t job_of_round(uint32_t worker, uint32_t round) const {
    return round * num_workers + (round % 2 ? num_workers - 1 - worker : worker);
  }
  // Numbers what the first runs have, count_of(run) each, and returns the number of all. One warp calls it; each lane
  // has consecutive runs.
  template <class CountOf>
  DISTMK_FN uint32_t number_runs(uint32_t num_runs, const CountOf& count_of) {
    constexpr uint32_t PER_LANE = MAX_SEQUENCES / 32;
    const uint32_t first = threadIdx.x * PER_LANE;
    uint32_t count[PER_LANE], sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < PER_LANE; ++i) sum += count[i] = first + i < num_runs ? count_of(first + i) : 0;
    uint32_t end = sum;
#pragma unroll
    for (uint32_t step = 1; step < 32; step *= 2) {
      const uint32_t before = __shfl_up_sync(~0u, end, step);
      if (threadIdx.x >= step) end += before;
    }
    uint32_t next = end - sum;
#pragma unroll
    for (uint32_t i = 0; i < PER_LANE; ++i) {
      first_job[first + i] = next;
      next += count[i];
    }
    return __shfl_sync(~0u, end, 31);
  }
  // All consumers call it, before one of them calls set_source().
  DISTMK_FN bool is_of(uint64_t iteration, const AttentionJobsArgs& args) const {
    return shared().attention_schedule == iteration + 1 && source.batch == args.batch && source.num_q == args.num_q &&
           source.num_kv == args.num_kv && source.head_dim == args.head_dim && source.group == args.group;
  }
  // One thread calls it.
  DISTMK_FN void set_source(uint64_t iteration, const AttentionJobsArgs& args) {
    source = {args.batch, args.num_q, args.num_kv, args.head_dim, args.group};
    shared().attention_schedule = iteration + 1;
  }
};
static_assert(sizeof(AttentionSchedule) == SCHEDULE_BYTES, "");
DISTMK_FN AttentionSchedule& attention_schedule() { return *shared().at<Overlay::SCHEDULE, AttentionSchedule>(); }

// The part of the state that belongs to one task.
struct AttentionPlan {
  alignas(16) uint32_t sort_keys[MAX_SEQUENCES];
  alignas(16) AttentionJobsArgs args;
  uint32_t worker;   // counted from the task's first worker
  AttentionJob job;  // the current block job
  RowPartials partials;

  DISTMK_FN uint32_t job_of_round(uint32_t round) const { return attention_schedule().job_of_round(worker, round); }
  // Whether this worker has block jobs.
  DISTMK_FN bool has_block_jobs() const { return job_of_round(0) < attention_schedule().num_block_jobs; }
};
DISTMK_FN AttentionPlan& attention_plan() { return *shared().at<Overlay::PLAN, AttentionPlan>(); }
template <class T>
DISTMK_FN T* at_operand(uint64_t operand) {
  return reinterpret_cast<T*>(own_rank_state().address(operand));
}

// Where a query of a run and a KV head is stored. Queries are numbered row * num_heads + head.
struct QueryPlace {
  uint32_t row, head;  // row of the iteration, head of this rank

  template <class Job>  // any type with run, first_head and num_heads
  DISTMK_FN QueryPlace(const Job& job, uint32_t query) {
    const uint32_t in_run = query / job.num_heads;
    row = static_cast<uint32_t>(job.run.row_begin) + in_run;
    head = job.first_head + query - in_run * job.num_heads;
  }
  DISTMK_FN const __nv_bfloat16* input(const AttentionJobsArgs& args) const {
    return at_operand<__nv_bfloat16>(args.q) + uint64_t{row} * args.q_stride + uint64_t{head} * args.head_dim;
  }
  // Offset of an element in the output.
  DISTMK_FN uint64_t output(const AttentionJobsArgs& args, uint32_t element) const {
    return activation_offset(row, head * args.head_dim + element, args.num_q * args.head_dim, args.tiled);
  }
};

// End of the positions that a query of a run sees. Queries behind the last count as the last.
DISTMK_FN uint32_t end_of_query(const BatchRun& run, uint32_t num_heads, uint32_t query) {
  const uint32_t last = static_cast<uint32_t>(run.num_rows) * num_heads - 1;
  return static_cast<uint32_t>(run.kv_len - run.num_rows) + min(query, last) / num_heads + 1;
}

}  // namespace jobs
}  // namespace distmk
