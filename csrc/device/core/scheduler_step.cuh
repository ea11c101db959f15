// The scheduler step on a GPU: prepares the next iteration's batch on copies in shared memory.
#pragma once
#include "device/core/shared.cuh"
#include "runtime/batcher.h"

namespace distmk {

// Only schedulers run it; their single thread goes through it step by step, so it works on copies in shared memory.
DISTMK_FN void body_scheduler_step(Context& context, const SchedulerStepArgs& args) {
  SchedulerCopies& copies = shared().prepare;
  const Team& team = context.team;
  const auto* candidates = context.at<Candidate>(args.candidates);
  const bool fits = args.num_ranks <= CACHED_RANKS;
  // Later it still has there what it left.
  if (context.iteration == context.params().first_iteration) {
    copy_bytes(team, &copies.state, context.at<void>(args.state), sizeof(BatcherState));
    copy_bytes(team, &copies.batch, context.at<void>(args.batch), sizeof(Batch));
  }
  if (fits) copy_bytes(team, copies.candidates, candidates, args.num_ranks * MAX_ROWS * sizeof(Candidate));
  team.sync();
  prepare_batch(context, args, {&copies.state, &copies.batch, fits ? copies.candidates : candidates});
}

}  // namespace distmk
