// The signaler warp: signals the triggers of each task (one lane per trigger) once its body is done and its waits are
// met, while the consumers go on. In between it prefetches the worker's task descriptors.
#pragma once
#include "device/core/hot_path.cuh"
#include "device/core/loader.cuh"
#include "runtime/trace.h"

namespace distmk {

// Whether the loader is throttled while the task's triggers are signaled, because other workers wait for them.
DISTMK_FN bool throttles_loader(const RankState& state, const TaskDesc& task) {
  switch (task.type) {
#define DISTMK_CASE(id, name, Args) \
  case id:                          \
    return throttles_signal(state, args_of<Args>(task));
    DISTMK_TASK_TYPES_STREAMS_WEIGHTS(DISTMK_CASE)
#undef DISTMK_CASE
  }
  return true;
}

template <class Traits>
DISTMK_FN bool may_complete_early(const RankState& state, const typename Traits::Args& args) {
  return Traits::may_complete_early(args) && !state.transport;
}
// Whether a task is complete as soon as its body is done. It is if the inputs that the body has polled imply the task's
// waits, or if the body had nothing to do.
DISTMK_FN bool completes_early(const Context& context, const TaskDesc& task) {
#define DISTMK_IF(id, name, Args) \
  if (task.type == id) return has_nothing_to_do<id>(context.rank_state, task);
  DISTMK_TASK_TYPES_MAY_IDLE(DISTMK_IF)
#undef DISTMK_IF
#define DISTMK_IF(id, name, Args)                                         \
  if (task.type == id) {                                                  \
    const auto& args = args_of<Args>(task);                               \
    return may_complete_early<TraitsOf<id>>(context.rank_state, args) &&  \
           rows_of(context.batch(args.batch)) > TraitsOf<id>::EARLY_ROWS; \
  }
  DISTMK_TASK_TYPES_COMPLETES_EARLY(DISTMK_IF)
#undef DISTMK_IF
  return false;
}

// Whether task n, whose body is done, may be signaled. If so, the waits of all earlier tasks are met too, so their
// descriptors can be released. A task that is ready may have pushed its signals, after which the batch may be
// overwritten, so completes_early() is asked only of others.
DISTMK_FN bool may_signal(const Context& context, TaskHandshake& handshake, uint32_t n) {
  if (context.team.all(handshake.is_ready(n) && !handshake.is_ended(n))) return true;
  return completes_early(context, *handshake.action[handshake_slot(n)].task.desc) &&
         context.team.all(!n || handshake.is_ready(n - 1));
}

DISTMK_NOINLINE void signaler_loop(const RankState& state, uint32_t worker, const Team warp) {
  Shared& s = shared();
  TaskHandshake& handshake = s.handshake;
  TaskPrefetcher prefetcher(state, state.queues[worker], s.tasks);
  Context context(state, warp);
  Tracer tracer(state, worker);
  bool last_was_listed = false;
  uint64_t body_end_ns = 0;
  for (uint32_t n = 0;;) {
    const bool leaving = !warp.all(!s.pipeline.leave.get());
    // After the end some tasks are never signaled. A throttle that was set for one of them is lifted here.
    if (warp.leader() && handshake.end_at.get() != ~0u) s.pipeline.throttle.set(0);
    const bool done = warp.all(barrier_test(&handshake.done[handshake_slot(n)], handshake_phase(n)));
    if (done && !body_end_ns) body_end_ns = tracer.now();
    if (done && may_signal(context, handshake, n)) {
      if (!handshake.is_revoked(n)) {
        const Action& action = handshake.action[handshake_slot(n)];
        context.begin(action.task, action.iteration, action.instance);
        context.set_pushed(handshake.pushed[handshake_slot(n)]);
        // Throttle 1: no slab but the first of the launch is copied during the fence.
        if (warp.leader() && throttles_loader(state, *action.task.desc)) s.pipeline.throttle.set(1);
        context.finish();
        tracer.record(context, handshake.ready_ns[handshake_slot(n)], body_end_ns);
        // Releases the previous task's descriptor, whose waits might have been polled until now.
        if (last_was_listed) prefetcher.release_slot();
        last_was_listed = action.kind == ActionKind::RUN;
      }
      warp.sync();
      if (warp.leader()) s.pipeline.throttle.set(0);
      warp_arrive(&handshake.signaled[handshake_slot(n)]);
      body_end_ns = 0;
      ++n;
    } else if (leaving) {
      return;
    } else if (prefetcher.has_room()) {
      prefetcher.fetch(warp);
    }
  }
}

}  // namespace distmk
