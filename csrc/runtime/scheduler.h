// A scheduler dispatches the tasks that are placed at run time. It owns the workers w with w % num_schedulers == id and
// decides from the events of its own rank. It never blocks: step() does what can be done now and returns. A scheduler
// that will never dispatch anything is done at once, because no event would tell the next scheduler step that it has
// read the batch metadata.
#pragma once
#include "runtime/jit_ring.h"
#include "runtime/sequences.h"
#include "runtime/task_types.h"
#include "runtime/trace.h"
#include "runtime/wait.h"

namespace distmk {

// Whether scheduler `id` ever dispatches a task to its workers.
DISTMK_FN bool has_launches(const RankState& state, uint32_t id) {
  for (uint32_t launch = 0; launch < state.program->num_launches; ++launch) {
    const auto kind = static_cast<LaunchKind>(state.tasks[state.launches[launch]].launch);
    if (kind == LaunchKind::SCHEDULER) continue;
    if (kind == LaunchKind::MASSIVE || launch % state.program->num_schedulers == id) return true;
  }
  return false;
}

// Runs the scheduler step, the only task that schedulers run themselves. Returns the time at which its body ended, or 0
// if it was postponed. `resumed`: it was postponed before.
enum class StepKind { SLABS, JOBS, DRAFTS };
template <StepKind KIND>
DISTMK_NOINLINE uint64_t run_scheduler_step(const RankState& state, const Team team, const TaskView task,
                                            uint64_t iteration, bool resumed) {
  Context context(state, team);
  context.begin(task, iteration);
  context.resumed = resumed;
  if constexpr (KIND == StepKind::DRAFTS)
    body_draft_step(context, args_of<SchedulerStepArgs>(*task.desc));
  else if constexpr (KIND == StepKind::JOBS)
    body_job_step(context, args_of<SchedulerStepArgs>(*task.desc));
  else
    run_scheduler_body(context);
  if (context.postponed()) return 0;
  const uint64_t body_end_ns = now_ns();
  context.finish();
  return body_end_ns;
}

// `Tasks` is the source of task descriptors (runtime/task_source.h).
template <class Tasks>
class Scheduler {
 public:
  using Holder = typename Tasks::Holder;

  DISTMK_FN Scheduler(const RankState& state, uint32_t id, const Team& team, const Holder& holder)
      : state_(state), team_(team), tracer_(state, state.program->num_workers + id), id_(id), holder_(holder) {
    if (!dispatches_) close_rings(CLOSED_FOREVER);
    if (dispatches_ || (id == 0 && state.program->num_launches))
      move_to(0);
    else
      done_ = true;
  }

  DISTMK_FN bool done() const { return done_; }
  DISTMK_FN uint64_t iteration() const { return iteration_; }
  // The current task of the launch list; none while its iteration may not start yet.
  DISTMK_FN TaskView current_task() const {
    return task_.desc && (barrier_passed_ || runs_here()) ? task_ : TaskView{};
  }
  // The current task, if the next step() depends on whether its waits are met.
  DISTMK_FN TaskView awaited_task() const { return dispatching_ || !is_mine_ ? TaskView{} : current_task(); }
  // awaited_task(), if the next step() would dispatch it.
  DISTMK_FN TaskView next_dispatch() const { return task_.desc && runs_here() ? TaskView{} : awaited_task(); }
  // The first instance of the current task that falls to `worker`, even if the task has fewer.
  DISTMK_FN uint32_t first_instance(uint32_t worker) const {
    if (!is_massive()) return 0;
    const uint32_t num_workers = state_.program->num_workers;
    return (worker + num_workers - launch_ % num_workers) % num_workers;
  }
  DISTMK_FN const Holder& holder() const { return holder_; }

  // Returns whether anything was done.
  DISTMK_FN bool step() {
    const TaskView task = awaited_task();
    return step(task.desc && waits_met(state_, task, iteration_, team_));
  }
  // step() for a caller that has polled the waits of awaited_task() itself.
  DISTMK_FN bool step(bool met) {
    if (done_) return false;
    if (dispatched_) return finish_launch();
    if (task_.desc && runs_here()) return run_here(met);
    if (!barrier_passed_) {
      const IterationBarrier barrier = iteration_barrier_state(state_, iteration_, team_);
      if (barrier == IterationBarrier::CLOSED) return false;
      if (barrier == IterationBarrier::STOP) {
        done_ = true;
        if (dispatches_) close_rings(iteration_);
        return true;
      }
      return barrier_passed_ = true;
    }
    if (task_.desc) return dispatch(met);
    ++iteration_;
    barrier_passed_ = false;
    move_to(0);
    return true;
  }

 private:
  const RankState& state_;
  const Team team_;
  Tracer tracer_;
  uint32_t id_;
  Holder holder_;
  const bool dispatches_ = has_launches(state_, id_);
  bool done_ = false;
  uint64_t iteration_ = state_.params->first_iteration;
  uint32_t launch_ = 0;          // index of the current entry in the rank's launch list
  TaskView task_;                // the current task; no descriptor past the end of the list
  bool is_mine_ = false;         // this scheduler dispatches or runs it
  uint32_t worker_ = 0;          // the worker that is given instances
  uint32_t instance_ = 0;        // its next instance
  uint32_t num_instances_ = 0;   // instances of the launch that is being dispatched
  uint32_t num_pushed_ = 0;      // how many of them this scheduler has pushed
  uint64_t start_ns_ = 0;        // when the launch's waits were met
  bool dispatching_ = false;     // the launch's waits are met; some instances may be pushed
  bool dispatched_ = false;      // all instances are pushed; the next step() calls finish_launch()
  bool barrier_passed_ = false;  // the iteration has started
  bool postponed_ = false;       // the scheduler step was called and is not done

  DISTMK_FN Context context() const {
    Context context(state_, team_);
    context.begin(task_, iteration_);
    return context;
  }
  DISTMK_FN bool is_massive() const { return task_.desc->launch == static_cast<uint16_t>(LaunchKind::MASSIVE); }
  DISTMK_FN bool runs_here() const { return task_.desc->launch == static_cast<uint16_t>(LaunchKind::SCHEDULER); }

  DISTMK_FN void move_to(uint32_t launch) {
    launch_ = launch;
    if (launch_ < state_.program->num_launches && iteration_ < end_iteration(*state_.params))
      task_ = holder_.take(state_, state_.launches[launch_], team_);
    else
      task_ = TaskView{};
    const auto dispatched_by_me = [&] { return is_massive() || launch_ % state_.program->num_schedulers == id_; };
    is_mine_ = task_.desc && (runs_here() ? id_ == 0 : dispatched_by_me());
  }

  // Tells this scheduler's workers that nothing more will be dispatched for iterations before `iteration`.
  DISTMK_FN void close_rings(uint64_t iteration) {
    for (uint32_t worker = id_; worker < state_.program->num_workers; worker += state_.program->num_schedulers)
      jit_ring_of(state_, worker).close(team_, iteration);
  }

  // Whether the batch of this iteration exists already: the program that had the turn before has made it.
  DISTMK_FN bool has_batch() const {
    return state_.params->has_first_batch && iteration_ == state_.params->first_iteration;
  }

  template <StepKind KIND>
  DISTMK_FN uint64_t run_step() const {
    return run_scheduler_step<KIND>(state_, team_, task_, iteration_, postponed_);
  }
  DISTMK_FN bool run_here(bool met) {
    if (is_mine_ && !has_batch()) {
      if (!met) return false;
      start_ns_ = tracer_.now();
      const auto& args = args_of<SchedulerStepArgs>(*task_.desc);
      const uint64_t body_end_ns = has_drafts(args) ? run_step<StepKind::DRAFTS>()
                                   : has_jobs(args) ? run_step<StepKind::JOBS>()
                                                    : run_step<StepKind::SLABS>();
      postponed_ = !body_end_ns;
      if (postponed_) return false;
      tracer_.record(context(), start_ns_, body_end_ns);
    }
    move_to(launch_ + 1);
    return true;
  }

  DISTMK_FN void move_to_worker(uint32_t worker) {
    worker_ = worker;
    // Rotated by the launch, so that the first instances of small launches do not all go to the same worker.
    instance_ = first_instance(worker);
  }

  DISTMK_FN bool dispatch(bool met) {
    if (!is_mine_) {
      move_to(launch_ + 1);
      return true;
    }
    const bool massive = is_massive();
    const uint32_t num_schedulers = state_.program->num_schedulers;
    if (!dispatching_) {
      if (!met) return false;
      start_ns_ = tracer_.now();
      num_instances_ = massive ? num_instances(context(), *task_.desc) : 1;
      num_pushed_ = 0;
      move_to_worker(id_);
      dispatching_ = true;
    }
    // A single task goes to one worker of this scheduler. The instances of a massive launch go round all workers; each
    // scheduler pushes its own workers' share.
    const uint32_t num_workers = massive ? state_.program->num_workers : id_ + 1;
    for (; worker_ < num_workers; move_to_worker(worker_ + num_schedulers)) {
      for (; instance_ < num_instances_; instance_ += num_workers) {
        const JitEntry entry{task_.index, static_cast<uint32_t>(iteration_), instance_, 0};
        if (!jit_ring_of(state_, worker_).push(team_, entry)) return false;
        ++num_pushed_;
      }
    }
    dispatched_ = true;
    // On a GPU signaling is a step of its own, so that a worker that steps its scheduler starts its instance first.
    return SIGNALS_TAKE_LONG || finish_launch();
  }

  DISTMK_FN bool finish_launch() {
    const uint64_t pushed_ns = tracer_.now();
    // Every scheduler accounts for `max_instances`, so the event also says that every scheduler has read the batch
    // metadata.
    if (is_massive()) context().finish_unused(task_.desc->max_instances - num_pushed_);
    tracer_.record(context(), start_ns_, pushed_ns);
    dispatching_ = dispatched_ = false;
    move_to(launch_ + 1);
    return true;
  }
};

// The loop of a scheduler that has a thread or warp of its own.
template <class Tasks>
DISTMK_FN void run_scheduler(const RankState& state, uint32_t id, const Team& team, Scheduler<Tasks>& scheduler) {
  Backoff backoff(state, state.program->num_workers + id, team);
  while (!scheduler.done()) {
    if (scheduler.step())
      backoff.reset();
    else if (!backoff.wait(scheduler.current_task(), scheduler.iteration()))
      break;
  }
}

}  // namespace distmk
