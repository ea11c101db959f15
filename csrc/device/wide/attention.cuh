// Attention of a wide iteration: which jobs there are, and which of them a worker runs (attention_block.cuh has a job).
#pragma once
#include "device/wide/attention_block.cuh"

namespace distmk {
namespace wide {

constexpr uint32_t MOST_QUERIES = 128;  // of a job; else 64 or 32

// The jobs of a task in the order of their cost: runs with many positions first, of each the last rows first. Every
// thread works out for itself how many there are.
class AttentionJobs {
 public:
  DISTMK_FN AttentionJobs(const Context& context, const WideAttentionArgs& args)
      : args_(args), plan_(attention_plan()) {
    num_runs_ = context.batch(args.batch)->num_wide_runs;
    most_heads_ = min(args.group, args.num_q);
    sort(context);
    const uint32_t num_workers = context.rank_state.program->num_workers;
    // A job takes as long as it has queries, and a little longer.
    uint32_t least = ~0u;
    for (uint32_t queries = MOST_QUERIES; queries >= 32; queries /= 2) {
      const uint32_t time = (count(queries) + num_workers - 1) / num_workers * (queries + 24);
      if (time >= least) continue;
      least = time;
      job_queries_ = queries;
    }
    num_jobs_ = count(job_queries_);
  }
  DISTMK_FN uint32_t num_jobs() const { return num_jobs_; }

  // Job `index` and the queries that it takes at most. False: its KV head has fewer query heads than others, so that
  // there are none.
  DISTMK_FN bool find(uint32_t index, AttentionJob& job, uint32_t& queries) const {
    uint32_t i = 0;
    for (; i + 1 < num_runs_ && index >= jobs_of(i, job_queries_); ++i) index -= jobs_of(i, job_queries_);
    job.run = plan_.runs[i];
    queries = queries_of(i, job_queries_);
    const uint32_t num_blocks = jobs_of(i, job_queries_) / args_.num_kv, from_last = index / args_.num_kv;
    job.kv_head = index - from_last * args_.num_kv;
    job.first_query = (num_blocks - 1 - from_last) * queries;
    const uint32_t model_kv = args_.kv_begin + job.kv_head;
    const uint32_t first = max(model_kv * args_.group, args_.q_begin),
                   last = min((model_kv + 1) * args_.group, args_.q_begin + args_.num_q);
    job.first_head = first - args_.q_begin;
    job.num_heads = last > first ? last - first : 0;
    if (job.first_query >= static_cast<uint32_t>(job.run.num_rows) * job.num_heads) return false;
    const uint32_t first_row =
        static_cast<uint32_t>(job.run.kv_len - job.run.num_rows) + job.first_query / job.num_heads;
    job.first_position = first_seen(args_.window, first_row) / KV_ROWS * KV_ROWS;
    return true;
  }

 private:
  const WideAttentionArgs& args_;
  AttentionPlan& plan_;
  uint32_t num_runs_, most_heads_, job_queries_ = MOST_QUERIES, num_jobs_;

  DISTMK_FN void sort(const Context& context) {
    load_runs(context, args_.batch, num_runs_, plan_.given);
    context.team.sync();
    if (const uint32_t i = context.team.index; i < num_runs_) {
      uint32_t before = 0;
      for (uint32_t j = 0; j < num_runs_; ++j)
        before +=
            plan_.given[j].kv_len > plan_.given[i].kv_len || (plan_.given[j].kv_len == plan_.given[i].kv_len && j < i);
      plan_.runs[before] = plan_.given[i];
    }
    context.team.sync();
  }
  DISTMK_FN uint32_t run_queries(uint32_t run) const {
    return static_cast<uint32_t>(plan_.runs[run].num_rows) * most_heads_;
  }
  // A run with few queries has smaller jobs.
  DISTMK_FN uint32_t queries_of(uint32_t run, uint32_t most) const {
    uint32_t queries = 32;
    while (queries < most && queries < run_queries(run)) queries *= 2;
    return queries;
  }
  DISTMK_FN uint32_t jobs_of(uint32_t run, uint32_t most) const {
    const uint32_t queries = queries_of(run, most);
    return (run_queries(run) + queries - 1) / queries * args_.num_kv;
  }
  DISTMK_FN uint32_t count(uint32_t most) const {
    uint32_t total = 0;
    for (uint32_t i = 0; i < num_runs_; ++i) total += jobs_of(i, most);
    return total;
  }
};

template <uint32_t DIM>
DISTMK_FN void run_attention_job_of(uint32_t queries) {
  if (queries == MOST_QUERIES)
    run_attention_job<DIM, 64>();
  else if (queries == MOST_QUERIES / 2)
    run_attention_job<DIM, 32>();
  else
    run_attention_job<DIM, 16>();
}

}  // namespace wide

DISTMK_FN void body_wide_attention(Context& context, const WideAttentionArgs& args) {
  if (!context.batch(args.batch)->num_wide_rows) return;
  const wide::AttentionJobs jobs(context, args);
  const bool large = args.head_dim > wide::MAX_HEAD_DIM / 2;
  if (large)
    wide::zero_padding<wide::MAX_HEAD_DIM>(args.head_dim);
  else
    wide::zero_padding<wide::MAX_HEAD_DIM / 2>(args.head_dim);
  // In turn from the first worker to the last and back, as jobs get shorter.
  const uint32_t num_workers = context.rank_state.program->num_workers;
  for (uint32_t round = 0; round * num_workers < jobs.num_jobs(); ++round) {
    const uint32_t in_round = round % 2 ? num_workers - 1 - context.instance : context.instance;
    wide::AttentionJob job;
    uint32_t queries;
    if (round * num_workers + in_round >= jobs.num_jobs()) break;
    if (!jobs.find(round * num_workers + in_round, job, queries)) continue;
    context.team.sync();  // all warps are done with the last one
    if (context.team.leader()) {
      wide::attention_plan().args = args;
      wide::attention_plan().job = job;
    }
    context.team.sync();
    if (large)
      wide::run_attention_job_of<wide::MAX_HEAD_DIM>(queries);
    else
      wide::run_attention_job_of<wide::MAX_HEAD_DIM / 2>(queries);
  }
  fence_copies();  // the output is read by bulk copies
}

}  // namespace distmk
