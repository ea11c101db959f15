// Loads the runs of a job iteration into shared memory, for tasks that look at them often (append_kv.cuh, attention).
#pragma once
#include "device/core/shared.cuh"
#include "runtime/job_batch.h"
#include "runtime/kv_cache.h"

namespace distmk {
namespace jobs {

// All consumers call it. They may read the runs after the next team.sync().
DISTMK_FN void load_runs(const Context& context, uint64_t operand, uint32_t num_runs, BatchRun* runs) {
  static_assert(MAX_SEQUENCES <= NUM_CONSUMERS, "a thread a run");
  const uint32_t i = context.team.index;
  if (i < num_runs) runs[i] = load_vector(job_batch(context, operand).runs + i);
}

// Called by a body that returns before it is done: waits until no copy of it can still land in shared memory.
DISTMK_FN void end_copies() {
  commit_copies();
  await_copies<0>();
}

}  // namespace jobs
}  // namespace distmk
