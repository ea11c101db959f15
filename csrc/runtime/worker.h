// What a worker runs: the tasks of its ahead-of-time list in order, each once its events have been signaled. In between
// it runs whatever a scheduler pushes into its just-in-time ring. Bodies never wait for a later task, so a dispatched
// task always runs. A spread task is in the list of every worker. Each worker waits for the same events, runs its own
// instances (often one or none) and then signals the task's triggers.
#pragma once
#include "runtime/scheduler.h"

namespace distmk {

// SPECULATE issues the task that the worker's scheduler will probably dispatch next, before its waits are met. The next
// action decides: COMMIT runs that task, RUN revokes it and runs another task instead.
enum class ActionKind : uint32_t { RUN, RUN_DISPATCHED, SPECULATE, COMMIT, LEAVE };

struct Action {
  ActionKind kind;
  uint32_t instance;  // of a spread task: this worker's first instance, even if the task has fewer
  uint64_t iteration;
  TaskView task;
};

// Whether a body may be entered before its task's waits are met, because it waits for its inputs itself: by
// inputs_ready(), or by polling them (begin_polling()).
DISTMK_FN constexpr bool begins_early(uint16_t type) {
  return StartSignal::EARLY && (polls_inputs(type) || has_prologue(type));
}

// Decides what a worker does next. `Tasks` is the source of task descriptors (runtime/task_source.h).
template <class Tasks>
class Worker {
 public:
  using List = typename Tasks::List;
  using Holder = typename Tasks::Holder;

  // All threads of `team` decide together. `local_scheduler` is a scheduler without a thread of its own, which this
  // worker steps; it may be null.
  DISTMK_FN Worker(const RankState& state, uint32_t worker, const Team& team, const List& list, const Holder& holder,
                   Scheduler<Tasks>* local_scheduler)
      : state_(state),
        worker_(worker),
        team_(team),
        queue_(state.queues[worker]),
        ring_(jit_ring_of(state, worker)),
        list_(list),
        holder_(holder),
        backoff_(state, worker, team),
        local_scheduler_(local_scheduler) {}

  // Iterations that this worker has completed, in this launch and in the launches before it.
  DISTMK_FN uint64_t iterations() const { return iteration_; }
  // After the worker has left: Batch::stop, or 0 if the launch was given up.
  DISTMK_FN uint32_t stop() const { return stop_; }

  // Waits until there is a task to run or the launch is over. The previous task may still be running.
  DISTMK_FN Action next() {
    for (;;) {
      bool busy = false;  // this pass made progress
      bool met = false;   // the waits of the list's current task are met
      if (local_scheduler_) {
        BothMet both{false, true};
        if (!committed_)
          both = both_met(state_, task_, iteration_, local_scheduler_->awaited_task(), local_scheduler_->iteration(),
                          team_);
        if (speculating_ && both.second) return commit();
        if (!speculating_) busy = local_scheduler_->step(both.second);
        met = both.first;
      }
      JitEntry entry;
      const bool popped = !speculating_ && ring_.pop(team_, &head_, &entry);
      if (local_scheduler_ && popped && committed_) {
        committed_ = false;
        continue;
      }
      if (popped || (!busy && !met && may_speculate(&entry))) {
        backoff_.reset();
        const TaskView task =
            holder_.take(state_, entry.task, team_, local_scheduler_ ? &local_scheduler_->holder() : nullptr);
        return {popped ? ActionKind::RUN_DISPATCHED : ActionKind::SPECULATE, entry.instance, entry.iteration, task};
      }
      if (!started_) {
        list_.poll_batch(state_, iteration_, team_);
        const IterationBarrier barrier = iteration_barrier_state(state_, iteration_, team_);
        if (barrier == IterationBarrier::STOP && ring_.drained(team_, head_, iteration_)) {
          // A launch in pieces may end before the next batch has arrived; then there is no stop to read.
          stop_ = iteration_ == end_iteration(*state_.params) ? 0 : stop_of(state_);
          return leave();
        }
        if (barrier == IterationBarrier::OPEN) {
          started_ = true;
          move_to(0);
          busy = local_scheduler_ != nullptr;  // the waits of the first task have not been polled yet
        }
      }
      if (!local_scheduler_ && task_.desc) met = waits_met(state_, task_, iteration_, team_);
      if (met) {
        backoff_.reset();
        if (local_scheduler_) speculating_ = speculation_tried_ = false;
        const Action action = run_listed(task_);
        move_to(next_ + 1);
        return action;
      }
      if (started_ && !task_.desc) {
        ++iteration_;
        started_ = false;
        busy = true;
        // The back-off also checks the abort flag, but a worker that is always busy never backs off.
        if (!team_.all(!load_relaxed(state_.abort_flag(state_.program->rank)))) return leave();
      }
      if (busy)
        backoff_.reset(), speculation_tried_ = false;
      else if (!wait())
        return leave();
    }
  }

  // The action that next() will return, if it is certain before the task's waits are met: nothing can be dispatched in
  // between.
  DISTMK_FN bool peek(Action* action) const {
    if (!started_ || !task_.desc || !ring_.drained(team_, head_, CLOSED_FOREVER)) return false;
    *action = run_listed(task_);
    return true;
  }
  // The actions after that one, within the iteration. peek_second() is valid if peek() is, and peek_third() if
  // peek_second() is.
  DISTMK_FN bool peek_second(Action* action) { return peek_at(1, second_, action); }
  DISTMK_FN bool peek_third(Action* action) { return peek_at(2, third_, action); }

 private:
  const RankState& state_;
  const uint32_t worker_;
  const Team team_;
  const Queue queue_;
  const JitRingView ring_;
  List list_;
  Holder holder_;
  Backoff backoff_;
  Scheduler<Tasks>* local_scheduler_;
  uint64_t iteration_ = state_.params->first_iteration;
  uint64_t head_ = load_relaxed(&ring_.ring->head);  // entries popped from the ring
  uint32_t next_ = 0;                                // index of the current entry in the list
  uint32_t stop_ = 0;
  TaskView task_;                   // the current task; none past the list's end or before the iteration starts
  TaskView second_, third_;         // the tasks after it, once peeked at
  bool started_ = false;            // this iteration's barrier has opened
  bool speculation_tried_ = false;  // may_speculate() was asked since the last progress
  bool speculating_ = false;        // the scheduler's next dispatch was issued early
  bool committed_ = false;          // that task runs, but its entry is not popped yet

  DISTMK_FN void move_to(uint32_t entry) {
    next_ = entry;
    task_ = second_;
    if (!task_.desc && entry < queue_.count) task_ = list_.next(state_, queue_.begin + entry);
    second_ = third_;
    third_ = {};
  }

  DISTMK_FN bool peek_at(uint32_t distance, TaskView& task, Action* action) {
    if (next_ + distance >= queue_.count) return false;
    if (!task.desc) task = list_.next(state_, queue_.begin + next_ + distance);
    *action = run_listed(task);
    return true;
  }

  DISTMK_FN uint32_t first_instance(const TaskView& task) const {
    if (!is_spread(*task.desc)) return 0;
    const uint32_t first = task.desc->first_worker;
    return worker_ >= first ? worker_ - first : worker_ + state_.program->num_workers - first;
  }

  DISTMK_FN Action run_listed(const TaskView& task) const {
    return {ActionKind::RUN, first_instance(task), iteration_, task};
  }
  // Runs the speculative task before the scheduler has dispatched it. next() then steps the scheduler until it has. As
  // the ring is empty, the first entry to be popped is this task's.
  DISTMK_FN Action commit() {
    backoff_.reset();
    speculating_ = speculation_tried_ = false;
    committed_ = true;
    return {ActionKind::COMMIT, 0, iteration_, {}};
  }
  // Whether to issue the scheduler's next dispatch speculatively. It must precede this worker's own next task in
  // program order, and its body must be one that is entered only when its inputs are ready. Asked once between two
  // steps of progress.
  DISTMK_FN bool may_speculate(JitEntry* entry) {
    if (!StartSignal::EARLY || !local_scheduler_ || speculation_tried_) return false;
    speculation_tried_ = true;
    const TaskView candidate = local_scheduler_->next_dispatch();
    if (speculating_ || !candidate.desc || begins_early(candidate.desc->type)) return false;
    const uint64_t iteration = local_scheduler_->iteration();
    const bool sooner =
        iteration == iteration_ ? task_.desc && candidate.desc->order < task_.desc->order : iteration < iteration_;
    *entry = {candidate.index, static_cast<uint32_t>(iteration), local_scheduler_->first_instance(worker_), 0};
    return speculating_ = sooner && entry->instance < candidate.desc->max_instances;
  }
  DISTMK_FN Action leave() const { return {ActionKind::LEAVE, 0, iteration_, {}}; }

  DISTMK_FN bool wait() {
    if (task_.desc || !local_scheduler_ || local_scheduler_->done()) return backoff_.wait(task_, iteration_);
    return backoff_.wait(local_scheduler_->current_task(), local_scheduler_->iteration());
  }
};

// Runs an action's task by `body(context)`: one instance if the task was dispatched, all of this worker's instances if
// it is spread. With `early` the body may be entered before its inputs are ready, and waits for them or polls them
// itself. Returns false if the launch ended, or the task was revoked, before its inputs were ready.
template <class Body>
DISTMK_FN bool run_action(Context& context, const Action& action, const StartSignal& start, bool early,
                          const Body& body) {
  context.begin(action.task, action.iteration, action.instance, start);
  if (!early && !context.inputs_ready()) return false;
  if (context.take_assigned(context.task.desc->max_instances))
    body(context);
  else
    context.inputs_polled();
  return context.inputs_ready();
}

// run_action() with the task type's body, then the task's triggers and its trace entry.
DISTMK_FN bool run_task(Context& context, const Action& action, Tracer& tracer) {
  const bool early = begins_early(action.task.desc->type);
  if (!run_action(context, action, {}, early, [](Context& c) { run_body(c); })) return false;
  const uint64_t body_end_ns = tracer.now();
  context.finish();
  tracer.record(context, context.ready_ns(), body_end_ns);
  return true;
}

}  // namespace distmk
