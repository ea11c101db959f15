// A worker runs its ahead-of-time tasks in order as their events fire, and whatever arrives in its ring in between.
// Bodies never wait, so a task that was handed out always gets its turn. A spread task is in every worker's list: each
// waits for the same events, runs its share of the instances, often one or none, and then fires the triggers.
#pragma once
#include "runtime/scheduler.h"

namespace distmk {

// What is likely to be handed out next may be said before its waits are met, to EXPECT it. What is said next is that it
// is to be run, or something else, and then it was said in vain.
enum class ActionKind : uint32_t { RUN, RUN_DISPATCHED, SPECULATE, COMMIT, LEAVE };

struct Action {
  ActionKind kind;
  uint32_t instance;  // of a spread task: the first of this worker's share, whether or not there are so many
  uint64_t iteration;
  TaskView task;
};

// Task types whose bodies ask themselves when their inputs are ready.
DISTMK_FN constexpr bool begins_early(TaskType type) {
  return StartSignal::EARLY && (type == TaskType::LINEAR || type == TaskType::ATTENTION || type == TaskType::COMBINE ||
                                type == TaskType::SUM);
}

// Decides what a worker does next.
class Worker {
 public:
  // `team` asks as one. `rider`, if any, is a scheduler that is stepped here because it has no thread of its own.
  DISTMK_FN Worker(const RankState& state, uint32_t worker, const Team& team, const TaskList& list,
                   const TaskHolder& holder, Scheduler* local_scheduler)
      : state_(state),
        worker_(worker),
        team_(team),
        queue_(state.queues[worker]),
        ring_(ring_of(state, worker)),
        list_(list),
        holder_(holder),
        idle_(state, worker, team),
        local_scheduler_(local_scheduler) {}

  // Iterations this worker has been through, in this launch and those before it; the present one not counted.
  DISTMK_FN uint64_t iterations() const { return iteration_; }

  // Waits until there is a task to run, or until the launch is over. The one before may still be running.
  DISTMK_FN Action next() {
    for (;;) {
      bool busy = false, met = false;  // something was done here; the waits of the task in hand are met
      if (local_scheduler_) {
        BothMet both{false, true};
        if (!committed_)
          both =
              both_met(state_, task_, iteration_, local_scheduler_->looks_at(), local_scheduler_->iteration(), team_);
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
        idle_.reset();
        const TaskView task =
            holder_.take(state_, entry.task, team_, local_scheduler_ ? &local_scheduler_->holder() : nullptr);
        return {popped ? ActionKind::RUN_DISPATCHED : ActionKind::SPECULATE, entry.instance, entry.iteration, task};
      }
      if (!started_) {
        list_.poll_batch(state_, iteration_, team_);
        const IterationBarrier gate = iteration_barrier_state(state_, iteration_, team_);
        if (gate == IterationBarrier::STOP && ring_.finished(team_, head_, iteration_)) return leave();
        if (gate == IterationBarrier::OPEN) {
          started_ = true;
          turn_to(0);
          busy = local_scheduler_ != nullptr;  // its waits have not been looked at
        }
      }
      if (!local_scheduler_ && task_.desc) met = waits_met(state_, task_, iteration_, team_);
      if (met) {
        idle_.reset();
        if (local_scheduler_) speculating_ = asked_ = false;
        const Action action = run_listed(task_);
        turn_to(next_ + 1);
        return action;
      }
      if (started_ && !task_.desc) {
        ++iteration_;
        started_ = false;
        busy = true;
        // A worker that always finds something to do would never ask otherwise.
        if (!team_.all(!load_relaxed(state_.abort_flag(state_.program->rank)))) return leave();
      }
      if (busy)
        idle_.reset(), asked_ = false;
      else if (!wait())
        return leave();
    }
  }

  // What next() will say, if it is known before the task's waits are met: where nothing can be handed out in between.
  DISTMK_FN bool peek(Action* action) const {
    if (!started_ || !task_.desc || !ring_.finished(team_, head_, NEVER_MORE)) return false;
    *action = run_listed(task_);
    return true;
  }
  // And what it will say after that, in the same iteration, if peek() is known; and then, if peek_second() is.
  DISTMK_FN bool peek_second(Action* action) { return look_up(1, second_, action); }
  DISTMK_FN bool peek_third(Action* action) { return look_up(2, third_, action); }

 private:
  const RankState& state_;
  const uint32_t worker_;
  const Team team_;
  const Queue queue_;
  const RingView ring_;
  TaskList list_;
  TaskHolder holder_;
  Idle idle_;
  Scheduler* local_scheduler_;
  uint64_t iteration_ = state_.params->first_iteration;
  uint64_t head_ = load_relaxed(&ring_.ring->head);  // entries taken from the ring
  uint32_t next_ = 0;                                // entry of the queue
  TaskView task_;             // its task; none behind the end or while the iteration may not start
  TaskView second_, third_;   // those behind it, once somebody has asked
  bool started_ = false;      // this iteration's gate has opened
  bool asked_ = false;        // may_speculate(), since something was done here
  bool speculating_ = false;  // what the rider offers
  bool committed_ = false;    // it is run already, though it has not been handed out

  DISTMK_FN void turn_to(uint32_t entry) {
    next_ = entry;
    task_ = second_;
    if (!task_.desc && entry < queue_.count) task_ = list_.next(state_, queue_.begin + entry);
    second_ = third_;
    third_ = {};
  }

  DISTMK_FN bool look_up(uint32_t later, TaskView& task, Action* action) {
    if (next_ + later >= queue_.count) return false;
    if (!task.desc) task = list_.next(state_, queue_.begin + next_ + later);
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
  // Before it is handed out, which next() sees to: nothing else is in the ring, so that it will be the first to come.
  DISTMK_FN Action commit() {
    idle_.reset();
    speculating_ = asked_ = false;
    committed_ = true;
    return {ActionKind::COMMIT, 0, iteration_, {}};
  }
  // Whether what the rider offers should be expected: if it comes before this worker's own next task in program order,
  // and its body is entered only when its inputs are there. Asked once as long as nothing is done.
  DISTMK_FN bool may_speculate(JitEntry* entry) {
    if (!StartSignal::EARLY || !local_scheduler_ || asked_) return false;
    asked_ = true;
    const TaskView offer = local_scheduler_->offers();
    if (speculating_ || !offer.desc || begins_early(static_cast<TaskType>(offer.desc->type))) return false;
    const uint64_t iteration = local_scheduler_->iteration();
    const bool sooner =
        iteration == iteration_ ? task_.desc && offer.desc->order < task_.desc->order : iteration < iteration_;
    *entry = {offer.index, static_cast<uint32_t>(iteration), local_scheduler_->first_instance(worker_), 0};
    return speculating_ = sooner && entry->instance < offer.desc->max_instances;
  }
  DISTMK_FN Action leave() const { return {ActionKind::LEAVE, 0, iteration_, {}}; }

  DISTMK_FN bool wait() {
    if (task_.desc || !local_scheduler_ || local_scheduler_->done()) return idle_.wait(task_, iteration_);
    return idle_.wait(local_scheduler_->waiting_for(), local_scheduler_->iteration());
  }
};

// Runs what was decided, by `body(context)`: of what was handed out one instance, of a spread task this worker's share.
// A body that `asks` does so itself when its inputs are ready.
// False: the launch was over before the task could start.
template <class Body>
DISTMK_FN bool run_action(Context& context, const Action& action, const StartSignal& start, bool asks,
                          const Body& body) {
  context.begin(action.task, action.iteration, action.instance, start);
  if (!asks && !context.inputs_ready()) return false;
  if (context.take_assigned(context.task.desc->max_instances))
    body(context);
  else
    context.inputs_polled();
  return context.inputs_ready();
}

// The same, and what follows a body.
DISTMK_FN bool run_task(Context& context, const Action& action, Tracer& tracer) {
  const bool asks = begins_early(static_cast<TaskType>(action.task.desc->type));
  if (!run_action(context, action, {}, asks, [](Context& c) { run_body(c); })) return false;
  const uint64_t body_end_ns = tracer.now();
  context.finish();
  tracer.keep(context, context.ready_ns(), body_end_ns);
  return true;
}

}  // namespace distmk
