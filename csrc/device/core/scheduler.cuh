// The GPU side of the schedulers: the loop of a scheduler warp (runtime/scheduler.h) and the body of the scheduler
// step.
#pragma once
#include "device/core/shared.cuh"
#include "runtime/scheduler_step.h"

namespace distmk {

// Later iterations of a launch find the copies of the last step still in shared memory.
DISTMK_FN void load_copies(const Context& context, const SchedulerStepArgs& args, SchedulerCopies& copies) {
  if (context.iteration != context.params().first_iteration) return;
  copy_bytes(context.team, &copies.state, context.at<void>(args.state), sizeof(BatcherState));
  copy_bytes(context.team, &copies.batch, context.at<void>(args.batch), sizeof(Batch));
}

// Builds the next batch (runtime/scheduler_step.h) on copies in shared memory. A single thread goes through it step by
// step, so each access to global memory would add its full latency.
DISTMK_FN void body_scheduler_step(Context& context, const SchedulerStepArgs& args) {
  SchedulerCopies& copies = shared().prepare;
  const Team& team = context.team;
  const auto* candidates = context.at<Candidate>(args.candidates);
  // A job iteration may sample more rows than the shared copy holds.
  const bool fits = args.num_ranks <= CACHED_RANKS && args.max_rows[args.program] <= MAX_ROWS;
  load_copies(context, args, copies);
  if (fits) copy_bytes(team, copies.candidates, candidates, args.num_ranks * MAX_ROWS * sizeof(Candidate));
  team.sync();
  prepare_batch(context, args,
                {&copies.state, &copies.batch, fits ? copies.candidates : candidates, far_sequences(context, args)});
}

// In a job program all lanes build the batch together. The other sequences, too, are then in shared memory, because no
// task runs now that would need it.
DISTMK_FN void body_job_step(Context& context, const SchedulerStepArgs& args) {
  SchedulerCopies& copies = shared().prepare;
  auto* far = shared().at<Overlay::FAR_SEQUENCES, Sequence>();
  load_copies(context, args, copies);
  copy_bytes(context.team, far, far_sequences(context, args), far_bytes(args));
  context.team.sync();
  prepare_batch_together(context, args, {&copies.state, &copies.batch, context.at<Candidate>(args.candidates), far},
                         copies.events);
}

// In a program with drafts, accept_drafts has found the tokens, so the candidates are not needed.
DISTMK_FN void body_draft_step(Context& context, const SchedulerStepArgs& args) {
  SchedulerCopies& copies = shared().prepare;
  load_copies(context, args, copies);
  context.team.sync();
  prepare_batch<DraftBatcher>(context, args, {&copies.state, &copies.batch, nullptr, far_sequences(context, args)});
}

// The loop of a scheduler that has a warp of its own. `slots`: room for the two tasks that it holds.
DISTMK_NOINLINE void scheduler_loop(const RankState& state, uint32_t id, const Team warp, TaskSlot* slots) {
  Scheduler<CachedTasks> scheduler(state, id, warp, CachedTasks::Holder(slots));
  run_scheduler(state, id, warp, scheduler);
}

}  // namespace distmk
