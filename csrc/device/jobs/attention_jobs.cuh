// The attention_jobs task of a job iteration: works out all jobs, and runs this worker's. Runs with few queries have
// row jobs (attention_rows.cuh), all other runs have block jobs (attention_block.cuh).
#pragma once
#include "device/jobs/attention_block.cuh"
#include "device/jobs/attention_rows.cuh"

namespace distmk {
namespace jobs {

constexpr uint32_t MOST_QUERIES = 128, FEWEST_QUERIES = 32;  // queries of a block job
constexpr uint32_t LARGE_HEAD_QUERIES = 64;                  // queries of every job with large heads

DISTMK_FN bool has_large_heads(const AttentionJobsArgs& args) { return args.head_dim > MAX_HEAD_DIM / 2; }

// The jobs of a task, in the order of their cost: block jobs, then row jobs. Within both kinds, runs with many
// positions come first, and within a run the last rows.
class AttentionJobs {
 public:
  DISTMK_FN explicit AttentionJobs(const AttentionJobsArgs& args)
      : args_(args), schedule_(attention_schedule()), most_heads_(min(args.group, args.num_q)) {}

  // Makes the schedule. All consumers work on it together, because there may be many runs. It is complete after the
  // next team.sync().
  DISTMK_FN void schedule(const Context& context) {
    sort_runs(context, context.batch(args_.batch)->num_job_runs);
    context.team.sync();
    if (!schedule_.num_block_runs) return balance();
    const uint32_t num_workers = schedule_.num_workers;
    // A job's time is taken as its number of queries plus a constant, 24 queries.
    uint32_t least = ~0u, job_queries = MOST_QUERIES;
    for (uint32_t queries = most_queries(); queries >= fewest_queries(); queries /= 2) {
      const uint32_t time = (count(queries) + num_workers - 1) / num_workers * (queries + 24);
      if (time >= least) continue;
      least = time;
      job_queries = queries;
    }
    if (threadIdx.x < 32) number_jobs(job_queries);
  }

  // The part of the schedule that depends on the window. All consumers call it.
  DISTMK_FN void balance() {
    const bool may_share = !schedule_.num_block_runs && args_.num_shares >= schedule_.num_workers;
    if (may_share && threadIdx.x < 32) RowBalance(args_).share_row_jobs();
  }

  // Finds block job `index` and the largest number of queries that it takes. False: its KV head has fewer query heads
  // than others, so no queries are left for the job.
  DISTMK_FN bool find(uint32_t index, AttentionJob& job, uint32_t& queries) const {
    uint32_t i = 0;  // the last run whose first job is not behind `index`
    for (uint32_t step = MAX_SEQUENCES / 2; step; step /= 2)
      if (i + step < schedule_.num_block_runs && schedule_.first_job[i + step] <= index) i += step;
    index -= schedule_.first_job[i];
    job.run = schedule_.runs[i];
    queries = queries_of(i, schedule_.job_queries);
    const uint32_t num_blocks = blocks_of(i, schedule_.job_queries), from_last = index / args_.num_kv;
    job.kv_head = index - from_last * args_.num_kv;
    job.first_query = (num_blocks - 1 - from_last) * queries;
    const QueryHeads<> heads(args_, job.kv_head);
    job.first_head = heads.first;
    job.num_heads = heads.num;
    if (job.first_query >= static_cast<uint32_t>(job.run.num_rows) * job.num_heads) return false;
    const uint32_t first_row =
        static_cast<uint32_t>(job.run.kv_len - job.run.num_rows) + job.first_query / job.num_heads;
    job.first_position = first_seen(args_.window, first_row) / KV_ROWS * KV_ROWS;
    return true;
  }

 private:
  const AttentionJobsArgs& args_;
  AttentionSchedule& schedule_;
  uint32_t most_heads_;

  DISTMK_FN uint32_t most_queries() const { return has_large_heads(args_) ? LARGE_HEAD_QUERIES : MOST_QUERIES; }
  DISTMK_FN uint32_t fewest_queries() const { return has_large_heads(args_) ? LARGE_HEAD_QUERIES : FEWEST_QUERIES; }
  DISTMK_FN bool has_row_jobs(const BatchRun& run) const {
    return !has_large_heads(args_) && static_cast<uint32_t>(run.num_rows) * most_heads_ <= ROW_QUERIES;
  }

  // Sorts the runs, two threads per run. A run's place is the number of runs before it, which its threads count.
  DISTMK_FN void sort_runs(const Context& context, uint32_t num_runs) {
    static_assert(2 * MAX_SEQUENCES == NUM_CONSUMERS && MAX_SEQUENCES == 4 * 32, "a warp's lanes have four runs each");
    constexpr uint32_t OF_BLOCKS = 1u << 31;
    const uint32_t i = threadIdx.x / 2;
    uint32_t* const sort_keys = attention_plan().sort_keys;
    BatchRun run;
    if (i < num_runs) run = load_vector(job_batch(context, args_.batch).runs + i);
    uint32_t key = 0;  // runs with greater keys come first; 0: no run
    if (i < num_runs) key = static_cast<uint32_t>(run.kv_len) | (has_row_jobs(run) ? 0 : OF_BLOCKS);
    if (threadIdx.x % 2 == 0) sort_keys[i] = key;
    context.team.sync();
    const auto* keys = reinterpret_cast<const uint4*>(sort_keys);
    uint32_t before = 0;
#pragma unroll 2
    for (uint32_t j = threadIdx.x % 2; 4 * j < num_runs; j += 2) {
      const uint4 others = keys[j];
      before += others.x + (4 * j < i) > key;
      before += others.y + (4 * j + 1 < i) > key;
      before += others.z + (4 * j + 2 < i) > key;
      before += others.w + (4 * j + 3 < i) > key;
    }
    before += __shfl_xor_sync(~0u, before, 1);
    if (i < num_runs && threadIdx.x % 2 == 0) schedule_.runs[before] = run;

    const uint4 four = keys[threadIdx.x % 32];
    const uint32_t num_block_runs =
        __reduce_add_sync(~0u, (four.x >> 31) + (four.y >> 31) + (four.z >> 31) + (four.w >> 31));
    if (!context.team.leader()) return;
    schedule_.num_workers = context.rank_state.program->num_workers;
    schedule_.num_block_runs = num_block_runs;
    schedule_.num_block_jobs = schedule_.row_share = 0;
    schedule_.num_jobs = (num_runs - num_block_runs) * args_.num_kv;
    schedule_.set_source(context.iteration, args_);
  }
  // Numbers the jobs of all runs. One warp does it.
  DISTMK_FN void number_jobs(uint32_t job_queries) const {
    const uint32_t num_jobs =
        schedule_.number_runs(schedule_.num_block_runs, [&](uint32_t run) { return jobs_of(run, job_queries); });
    if (threadIdx.x) return;
    schedule_.job_queries = job_queries;
    schedule_.num_block_jobs = num_jobs;
    schedule_.num_jobs += num_jobs;
  }
  DISTMK_FN uint32_t run_queries(uint32_t run) const {
    return static_cast<uint32_t>(schedule_.runs[run].num_rows) * most_heads_;
  }
  // A run with few queries has smaller jobs.
  DISTMK_FN uint32_t queries_of(uint32_t run, uint32_t most) const {
    uint32_t queries = fewest_queries();
    while (queries < most && queries < run_queries(run)) queries *= 2;
    return queries;
  }
  // Blocks of a run's queries, for one KV head.
  DISTMK_FN uint32_t blocks_of(uint32_t run, uint32_t most) const {
    const uint32_t queries = queries_of(run, most);
    return (run_queries(run) + queries - 1) >> floor_log2(queries);
  }
  DISTMK_FN uint32_t jobs_of(uint32_t run, uint32_t most) const { return blocks_of(run, most) * args_.num_kv; }
  // Number of jobs of all runs. Every warp computes it for itself.
  DISTMK_FN uint32_t count(uint32_t most) const {
    uint32_t total = 0;
    for (uint32_t i = threadIdx.x % 32; i < schedule_.num_block_runs; i += 32) total += jobs_of(i, most);
    return __reduce_add_sync(~0u, total);
  }
};

template <uint32_t DIM>
DISTMK_FN void run_attention_job_of(uint32_t queries) {
  if constexpr (DIM > MAX_HEAD_DIM / 2)
    run_attention_job<DIM, 64>();
  else if (queries == MOST_QUERIES)
    run_attention_job<DIM, 64>();
  else if (queries == MOST_QUERIES / 2)
    run_attention_job<DIM, 32>();
  else
    run_attention_job<DIM, 16>();
}

template <uint32_t DIM>
DISTMK_FN void run_block_jobs(const Context& context) {
  AttentionPlan& plan = attention_plan();
  const AttentionJobs jobs(plan.args);
  zero_padding<DIM>(plan.args.head_dim);
  for (uint32_t round = 0; plan.job_of_round(round) < attention_schedule().num_block_jobs; ++round) {
    AttentionJob job;
    uint32_t queries;
    if (!jobs.find(plan.job_of_round(round), job, queries)) continue;
    context.team.sync();  // all warps are done with the last job
    if (context.team.leader()) plan.job = job;
    context.team.sync();
    if (round == 0) mark(Mark::INPUTS);
    run_attention_job_of<DIM>(queries);
  }
  context.team.sync();
}

// Runs this worker's jobs.
template <uint32_t DIM>
DISTMK_FN void run_attention_jobs(Context& context) {
  const AttentionSchedule& schedule = attention_schedule();
  if (attention_plan().has_block_jobs()) {
    if (!context.inputs_ready()) return;
    run_block_jobs<DIM>(context);
  }
  if constexpr (DIM <= MAX_HEAD_DIM / 2)
    if (schedule.num_jobs > schedule.num_block_jobs)
      context.set_ready(schedule.row_share ? run_row_jobs<DIM, true>() : run_row_jobs<DIM, false>());
}

// Makes the plan of a task, and the schedule unless an earlier layer has left it. All consumers call it.
DISTMK_FN void plan_attention(const Context& context, const AttentionJobsArgs& args) {
  static_assert(sizeof(AttentionJobsArgs) % sizeof(uint4) == 0 && offsetof(TaskDesc, args) % sizeof(uint4) == 0, "");
  AttentionPlan& plan = attention_plan();
  copy_words(context.team, &plan.args, &args, 1);
  if (context.team.leader()) plan.worker = context.instance;
  AttentionJobs jobs(args);
  if (!attention_schedule().is_of(context.iteration, args))
    jobs.schedule(context);
  else if (attention_schedule().window != args.window)
    jobs.balance();
  context.team.sync();
  if (context.team.leader()) attention_schedule().window = args.window;  // all have read it
}

}  // namespace jobs

DISTMK_FN void body_attention_jobs(Context& context, const AttentionJobsArgs& args) {
  if (!context.begin_prologue() || !context.batch(args.batch)->num_job_rows) return;
  jobs::plan_attention(context, args);
  mark(Mark::PREPARED);
  if (jobs::has_large_heads(args))
    jobs::run_attention_jobs<MAX_HEAD_DIM>(context);
  else if (args.head_dim > MAX_HEAD_DIM / 4)
    jobs::run_attention_jobs<MAX_HEAD_DIM / 2>(context);
  else
    jobs::run_attention_jobs<MAX_HEAD_DIM / 4>(context);
}

}  // namespace distmk
