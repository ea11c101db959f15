// Runs a single task on the calling thread, for tests: no workers, no schedulers, no waiting.
#include "runtime/task_types.h"

namespace {

bool known(uint16_t type) {
#define DISTMK_KNOWN(id, name, Args) \
  if (type == id) return true;
  DISTMK_TASK_TYPES(DISTMK_KNOWN)
#undef DISTMK_KNOWN
  return false;
}

}  // namespace

// Runs the body and signals its triggers. Returns 0, or 1 for an unknown task type, or 2 if the program has another
// ABI.
extern "C" int distmk_run_task(const distmk::LaunchParams* params, const distmk::TaskDesc* task, uint64_t iteration,
                               uint32_t instance) {
  uint64_t faults_seen = 0;
  const distmk::RankState state(params, &faults_seen);
  if (state.program->magic != distmk::MAGIC || state.program->abi_hash != distmk::ABI_HASH) return 2;
  if (!known(task->type)) return 1;
  distmk::Context context(state, distmk::Team{});
  const auto index = static_cast<uint32_t>(task - state.tasks);
  context.begin({task, state.waits + task->wait_begin, state.triggers + task->trigger_begin, index}, iteration,
                instance);
  if (distmk::runs_on_scheduler(task->type))
    distmk::run_scheduler_body(context);
  else
    distmk::run_body(context);
  context.finish();
  return 0;
}
