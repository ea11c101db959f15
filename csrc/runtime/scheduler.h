// A scheduler hands out tasks chosen at run time. It owns the workers w with w % num_schedulers == id, decides from
// what it sees on its own rank, and never blocks: step() does what can be done now and returns. One that will never
// have anything to do is done at once: nothing would tell the next `prepare` that it has read the row table.
#pragma once
#include "runtime/jit_ring.h"
#include "runtime/splits.h"
#include "runtime/task_source.h"
#include "runtime/trace.h"
#include "runtime/wait.h"

namespace distmk {

// Whether scheduler `id` ever gives its workers anything.
DISTMK_FN bool has_launches(const RankState& state, uint32_t id) {
  for (uint32_t launch = 0; launch < state.program->num_launches; ++launch) {
    const auto kind = static_cast<LaunchKind>(state.tasks[state.launches[launch]].launch);
    if (kind == LaunchKind::SCHEDULER) continue;
    if (kind == LaunchKind::MASSIVE || launch % state.program->num_schedulers == id) return true;
  }
  return false;
}

// When its body was done.
DISTMK_NOINLINE uint64_t run_scheduler_step(const RankState& state, const Team team, const TaskView task,
                                            uint64_t iteration) {
  Context context(state, team);
  context.begin(task, iteration);
  body_scheduler_step(
      context, *reinterpret_cast<const SchedulerStepArgs*>(task.desc->args));  // there is no other for schedulers
  const uint64_t body_end_ns = now_ns();
  context.finish();
  return body_end_ns;
}

class Scheduler {
 public:
  DISTMK_FN Scheduler(const RankState& state, uint32_t id, const Team& team, const TaskHolder& holder)
      : state_(state), team_(team), tracer_(state, state.program->num_workers + id), id_(id), holder_(holder) {
    if (!dispatches_) close_rings(NEVER_MORE);
    if (dispatches_ || (id == 0 && state.program->num_launches))
      turn_to(0);
    else
      done_ = true;
  }

  DISTMK_FN bool done() const { return done_; }
  DISTMK_FN uint64_t iteration() const { return iteration_; }
  // The task in hand; none while the iteration may not start yet.
  DISTMK_FN TaskView waiting_for() const { return task_.desc && (barrier_passed_ || runs_here()) ? task_ : TaskView{}; }

  // The task whose waits decide what is done next, if any do.
  DISTMK_FN TaskView looks_at() const { return under_way_ || !is_mine_ ? TaskView{} : waiting_for(); }
  // The same, if that task is handed out then.
  DISTMK_FN TaskView offers() const { return task_.desc && runs_here() ? TaskView{} : looks_at(); }
  // Of the task in hand, the instance that `worker` is given first, if there are so many.
  DISTMK_FN uint32_t first_instance(uint32_t worker) const {
    if (!is_massive()) return 0;
    const uint32_t num_workers = state_.program->num_workers;
    return (worker + num_workers - launch_ % num_workers) % num_workers;
  }
  DISTMK_FN const TaskHolder& holder() const { return holder_; }

  DISTMK_FN bool step() {
    const TaskView task = looks_at();
    return step(task.desc && waits_met(state_, task, iteration_, team_));
  }
  // The same of who has looked at those waits already. True: something was done.
  DISTMK_FN bool step(bool met) {
    if (done_) return false;
    if (dispatched_) return end_launch();
    if (task_.desc && runs_here()) return run_here(met);
    if (!barrier_passed_) {
      const IterationBarrier gate = iteration_barrier_state(state_, iteration_, team_);
      if (gate == IterationBarrier::CLOSED) return false;
      if (gate == IterationBarrier::STOP) {
        done_ = true;
        if (dispatches_) close_rings(iteration_);
        return true;
      }
      return barrier_passed_ = true;
    }
    if (task_.desc) return dispatch(met);
    ++iteration_;
    barrier_passed_ = false;
    turn_to(0);
    return true;
  }

 private:
  const RankState& state_;
  const Team team_;
  Tracer tracer_;
  uint32_t id_;
  TaskHolder holder_;
  const bool dispatches_ = has_launches(state_, id_);
  bool done_ = false;
  uint64_t iteration_ = state_.params->first_iteration;
  uint32_t launch_ = 0;    // entry of the rank's launch list
  TaskView task_;          // its task; no descriptor behind the end of the list
  bool is_mine_ = false;   // it is for this scheduler
  uint32_t worker_ = 0;    // that is being given tasks
  uint32_t instance_ = 0;  // its next, of a launch that is under way
  uint32_t num_instances_ = 0;
  uint32_t num_pushed_ = 0;
  uint64_t start_ns_ = 0;
  bool under_way_ = false;   // a launch is being handed out
  bool dispatched_ = false;  // it has been, but its end is left for the next step
  bool barrier_passed_ = false;

  DISTMK_FN Context context() const {
    Context context(state_, team_);
    context.begin(task_, iteration_);
    return context;
  }
  DISTMK_FN bool is_massive() const { return task_.desc->launch == static_cast<uint16_t>(LaunchKind::MASSIVE); }
  DISTMK_FN bool runs_here() const { return task_.desc->launch == static_cast<uint16_t>(LaunchKind::SCHEDULER); }

  DISTMK_FN void turn_to(uint32_t launch) {
    launch_ = launch;
    if (launch_ < state_.program->num_launches && iteration_ < end_iteration(*state_.params))
      task_ = holder_.take(state_, state_.launches[launch_], team_);
    else
      task_ = TaskView{};
    const auto is_mine = [&] { return is_massive() || launch_ % state_.program->num_schedulers == id_; };
    is_mine_ = task_.desc && (runs_here() ? id_ == 0 : is_mine());
  }

  // Tells this scheduler's workers that nothing more will come for what is before `iteration`.
  DISTMK_FN void close_rings(uint64_t iteration) {
    for (uint32_t worker = id_; worker < state_.program->num_workers; worker += state_.program->num_schedulers)
      ring_of(state_, worker).close(team_, iteration);
  }

  DISTMK_FN bool run_here(bool met) {
    if (is_mine_) {
      if (!met) return false;
      start_ns_ = tracer_.now();
      tracer_.keep(context(), start_ns_, run_scheduler_step(state_, team_, task_, iteration_));
    }
    turn_to(launch_ + 1);
    return true;
  }

  // Launches begin at one worker after another, so that the first instances of small ones do not all meet at one.
  DISTMK_FN void turn_to_worker(uint32_t worker) {
    worker_ = worker;
    instance_ = first_instance(worker);
  }

  DISTMK_FN bool dispatch(bool met) {
    if (!is_mine_) {
      turn_to(launch_ + 1);
      return true;
    }
    const bool massive = is_massive();
    const uint32_t num_schedulers = state_.program->num_schedulers;
    if (!under_way_) {
      if (!met) return false;
      start_ns_ = tracer_.now();
      num_instances_ = massive ? num_instances(context(), *task_.desc) : 1;
      num_pushed_ = 0;
      turn_to_worker(id_);
      under_way_ = true;
    }
    // A single task goes to a worker of this scheduler; instances go round all workers, each pushed by its owner.
    const uint32_t num_workers = massive ? state_.program->num_workers : id_ + 1;
    for (; worker_ < num_workers; turn_to_worker(worker_ + num_schedulers)) {
      for (; instance_ < num_instances_; instance_ += num_workers) {
        const JitEntry entry{task_.index, static_cast<uint32_t>(iteration_), instance_, 0};
        if (!ring_of(state_, worker_).push(team_, entry)) return false;
        ++num_pushed_;
      }
    }
    dispatched_ = true;
    return SIGNALS_TAKE_LONG || end_launch();
  }

  // A step of its own where that takes long: who is stepped by a worker lets it begin first.
  DISTMK_FN bool end_launch() {
    const uint64_t pushed_ns = tracer_.now();
    // Every scheduler answers for `max_instances`, so that the event also says that each has read the batch.
    if (is_massive()) context().finish_unused(task_.desc->max_instances - num_pushed_);
    tracer_.keep(context(), start_ns_, pushed_ns);
    under_way_ = dispatched_ = false;
    turn_to(launch_ + 1);
    return true;
  }
};

// The life of a scheduler that has a thread or a warp of its own.
DISTMK_FN void run_scheduler(const RankState& state, uint32_t id, const Team& team, Scheduler& scheduler) {
  Idle idle(state, state.program->num_workers + id, team);
  while (!scheduler.done()) {
    if (scheduler.step())
      idle.reset();
    else if (!idle.wait(scheduler.waiting_for(), scheduler.iteration()))
      break;
  }
}

}  // namespace distmk
