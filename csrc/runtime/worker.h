// A worker runs its ahead-of-time tasks in order as their events fire, and whatever arrives in its ring in between.
// Bodies never wait, so a task that was handed out always gets its turn.
#pragma once
#include "runtime/scheduler.h"

namespace distmk {

enum class ActionKind : uint32_t { RUN, LEAVE };

struct Action {
  ActionKind kind;
  uint32_t task, instance;
  uint64_t iteration;
};

// Decides what a worker does next; the leader of its team alone asks.
class Worker {
 public:
  // `rider`, if any, is a scheduler that is stepped here because it has no thread of its own.
  DISTMK_FN Worker(const RankState& state, uint32_t worker, Scheduler* rider)
      : state_(state),
        queue_(state.queues[worker]),
        ring_(state.ring(worker)),
        capacity_(state.program->jit_capacity),
        idle_(state, worker),
        rider_(rider) {}

  // Iterations this worker has been through, the present one not counted.
  DISTMK_FN uint64_t iterations() const { return iteration_; }

  // Waits until there is a task to run, or until the launch is over.
  DISTMK_FN Action next() {
    for (;;) {
      bool busy = rider_ && rider_->step();
      JitEntry entry;
      if (ring_pop(ring_, capacity_, &head_, &entry)) {
        idle_.reset();
        return {ActionKind::RUN, entry.task, entry.instance, entry.iteration};
      }
      if (!started_) {
        const Gate gate = gate_state(state_, iteration_);
        if (gate == Gate::STOP && nothing_more()) return leave();
        started_ = gate == Gate::OPEN;
      }
      const TaskDesc* task = started_ && next_ < queue_.count ? &state_.tasks[queue_.begin + next_] : nullptr;
      if (task && ready(*task)) {
        idle_.reset();
        return {ActionKind::RUN, queue_.begin + next_++, 0, iteration_};
      }
      if (started_ && next_ == queue_.count) {
        ++iteration_;
        next_ = 0;
        started_ = false;
        busy = true;
        // A worker that always finds something to do would never ask otherwise.
        if (load_relaxed(state_.abort_flag(state_.program->rank))) return leave();
      }
      if (busy)
        idle_.reset();
      else if (!wait_for(task))
        return leave();
    }
  }

 private:
  const RankState& state_;
  const Queue queue_;
  JitRing* ring_;
  const uint32_t capacity_;
  Idle idle_;
  Scheduler* rider_;
  uint64_t iteration_ = 0;
  uint64_t head_ = 0;                  // entries taken from the ring
  const uint64_t* pending_ = nullptr;  // event of the unmet wait
  uint64_t pending_want_ = 0;
  bool pending_system_ = false;
  uint32_t next_ = 0;     // entry of the queue
  bool started_ = false;  // this iteration's gate has opened

  // Polls the wait that was not met the last time before it looks at the task again.
  DISTMK_FN bool ready(const TaskDesc& task) {
    if (pending_ && load_acquire(pending_, pending_system_) < pending_want_) return false;
    const Wait* wait = unmet_wait(state_, task, iteration_);
    pending_ = wait ? state_.event(state_.program->rank, wait->event) : nullptr;
    if (wait) {
      pending_want_ = wanted(*wait, iteration_);
      pending_system_ = wait->system;
    }
    return !wait;
  }

  DISTMK_FN Action leave() const { return {ActionKind::LEAVE, 0, 0, iteration_}; }
  DISTMK_FN bool nothing_more() const { return load_acquire(&ring_->closed) && load_acquire(&ring_->tail) == head_; }
  DISTMK_FN bool wait_for(const TaskDesc* task) {
    if (task || !rider_) return idle_.wait(task, iteration_);
    return idle_.wait(rider_->waiting_for(), rider_->iteration());
  }
};

DISTMK_FN void run_task(Context& context, const Action& action, Tracer& tracer) {
  context.task = &context.rank_state.tasks[action.task];
  context.iteration = action.iteration;
  context.instance = action.instance;
  const uint64_t start_ns = tracer.now();
  run_body(context);
  const uint64_t body_end_ns = tracer.now();
  context.finish();
  tracer.keep(context, start_ns, body_end_ns);
}

}  // namespace distmk
