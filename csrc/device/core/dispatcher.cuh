// The dispatcher warp: decides what its worker runs next (runtime/worker.h) and issues tasks to the consumers ahead of
// time. While one task runs, it polls the events of the next, one lane per wait, and then marks it ready. It also
// caches the batch metadata, keeps the worker's attention assignment up to date, and steps the worker's own scheduler
// if that scheduler dispatches anything.
#pragma once
#include <cstddef>
#include <type_traits>

#include "device/core/hot_path.cuh"

namespace distmk {

using CachedScheduler = Scheduler<CachedTasks>;

// `Observer`: sees each task before it is issued, so that an operator can prepare something for it
// (device/operators.cuh).
//
// `LocalScheduler`: nullptr_t, or CachedScheduler* if the worker steps a scheduler. Without a scheduler, nothing can be
// dispatched between two tasks of the list, so the next tasks are known and issued early. With one, the task that will
// probably be dispatched next is issued speculatively, and revoked if another task runs first.
template <class Observer, class LocalScheduler>
DISTMK_FN void run_dispatcher(const RankState& state, uint32_t worker, const Team& warp,
                              LocalScheduler local_scheduler) {
  constexpr bool KNOWS_AHEAD = std::is_same_v<LocalScheduler, std::nullptr_t>;
  Shared& s = shared();
  TaskHandshake& handshake = s.handshake;
  uint32_t n = 0;           // number of the task that becomes ready next
  uint32_t num_issued = 0;  // n, or up to three more than n
  const CachedTasks::List list(s.tasks, s.batch, s.num_batches, handshake.signaled, n);
  Worker<CachedTasks> actions(state, worker, warp, list, CachedTasks::Holder(s.dispatched), local_scheduler);
  Observer observer(state, warp);
  const auto issue = [&](const Action& action) {
    observer.update_for(num_issued, action);
    handshake.issue(warp, num_issued++, action, code_path_of(state, action));
  };
  const auto next_task = [&] {
    if (n) barrier_wait(&handshake.signaled[handshake_slot(n - 1)], handshake_phase(n - 1));
    ++n;
  };
  for (;;) {
    Action ahead;
    if (KNOWS_AHEAD && num_issued == n && actions.peek(&ahead)) issue(ahead);
    if (KNOWS_AHEAD && num_issued == n + 1 && actions.peek_second(&ahead)) issue(ahead);
    if (KNOWS_AHEAD && num_issued == n + 2 && actions.peek_third(&ahead) && ahead.task.desc->deep_lookahead)
      issue(ahead);
    const Action action = actions.next();
    if (!KNOWS_AHEAD && num_issued > n && action.kind == ActionKind::RUN) {
      handshake.revoke(warp, n);
      next_task();
    }
    const bool leaves = action.kind == ActionKind::LEAVE, was_issued = num_issued > n;
    if (!was_issued) issue(action);
    if (!KNOWS_AHEAD && action.kind == ActionKind::SPECULATE) continue;
    if (warp.leader() && leaves) handshake.end_at.set(n);
    warp_arrive(&handshake.ready[handshake_slot(n)]);
    next_task();
    if (!leaves) continue;
    // Tasks that were issued ahead will not run. Marking them ready ends the polling and waiting of their bodies.
    for (; n < num_issued; ++n) warp_arrive(&handshake.ready[handshake_slot(n)]);
    if (was_issued) issue(action);
    break;
  }
  if (worker || !warp.leader()) return;
  const uint64_t reason = load_relaxed(state.abort_flag(state.program->rank));
  if (reason) raise_abort(state, static_cast<Abort>(reason));  // the host may have raised the flag of this rank alone
  uint64_t* done = &reinterpret_cast<LaunchParams*>(state.params->self)->iterations_done;
  store_relaxed(done, load_relaxed(done) + actions.iterations() - state.params->first_iteration);
}

}  // namespace distmk
