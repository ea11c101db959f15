// A worker runs its ahead-of-time tasks in order as their events fire, and whatever arrives in its ring in between.
// Bodies never wait, so a task that was handed out always gets its turn.
#pragma once
#include "runtime/scheduler.h"

namespace distmk {

DISTMK_FN void run_task(Context& context, uint32_t task, uint64_t iteration, uint32_t instance) {
  context.task = &context.rank_state.tasks[task];
  context.iteration = iteration;
  context.instance = instance;
  run_body(context);
  context.finish();
}

// `owner` fills this worker's ring; `rider`, if any, is stepped here because it has no thread of its own.
// Returns the number of iterations run, or fewer after an abort.
DISTMK_FN uint64_t worker_loop(const RankState& state, uint32_t worker, const Scheduler& owner, Scheduler* rider) {
  const Queue queue = state.queues[worker];
  JitRing* ring = state.ring(worker);
  Context context(state);
  Idle idle(state, worker);
  uint64_t iteration = 0;
  uint32_t next = 0;
  bool started = false;  // this iteration's gate has opened
  for (;;) {
    bool busy = rider && rider->step();
    JitEntry entry;
    if (ring_pop(ring, state.program->jit_capacity, &entry)) {
      run_task(context, entry.task, entry.iteration, entry.instance);
      idle.reset();
      continue;
    }
    if (!started) {
      const Gate gate = gate_state(state, iteration);
      if (gate == Gate::STOP && owner.done() && load_acquire(&ring->tail) == load_relaxed(&ring->head))
        return iteration;
      started = gate == Gate::OPEN;
    }
    const TaskDesc* task = started && next < queue.count ? &state.tasks[queue.begin + next] : nullptr;
    if (task && !unmet_wait(state, *task, iteration)) {
      run_task(context, queue.begin + next, iteration, 0);
      ++next;
      busy = true;
    }
    if (started && next == queue.count) {
      ++iteration;
      next = 0;
      started = false;
      busy = true;
      // A worker that always finds something to do would never ask otherwise.
      if (load_relaxed(state.abort_flag(state.program->rank))) return iteration;
    }
    if (busy) {
      idle.reset();
    } else if (!(task || !rider ? idle.wait(task, iteration) : idle.wait(rider->waiting_for(), rider->iteration()))) {
      return iteration;
    }
  }
}

}  // namespace distmk
