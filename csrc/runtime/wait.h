// Waiting: when a task may run, when an iteration starts, and when a waiter must give up.
#pragma once
#include "runtime/context.h"

namespace distmk {

// The count that meets `wait` in this iteration.
DISTMK_FN uint64_t wanted(const Wait& wait, uint64_t iteration) { return wait.count * (iteration + 1 - wait.lag); }

// The first wait of a task that is not yet met in this iteration, or null.
DISTMK_FN const Wait* unmet_wait(const RankState& state, const TaskDesc& task, uint64_t iteration) {
  for (uint32_t w = 0; w < task.num_waits; ++w) {
    const Wait& wait = state.waits[task.wait_begin + w];
    if (load_acquire(state.event(state.program->rank, wait.event), wait.system) < wanted(wait, iteration)) return &wait;
  }
  return nullptr;
}

enum class Gate : uint32_t { CLOSED, OPEN, STOP };

// Whether iteration `iteration` may start here: its batch has arrived, or the launch has a fixed number of iterations.
DISTMK_FN Gate gate_state(const RankState& state, uint64_t iteration) {
  const ProgramHeader& program = *state.program;
  if (program.gate_event == NO_EVENT) return iteration < state.params->num_iterations ? Gate::OPEN : Gate::STOP;
  if (load_acquire(state.event(program.rank, program.gate_event), program.num_ranks > 1) < iteration + 1)
    return Gate::CLOSED;
  return reinterpret_cast<const Batch*>(state.address(program.gate_batch))->stop ? Gate::STOP : Gate::OPEN;
}

DISTMK_FN void raise_abort(const RankState& state, Abort reason) {
  for (uint32_t rank = 0; rank < state.program->num_ranks; ++rank) {
    uint64_t* flag = state.abort_flag(rank);
    if (!load_relaxed(flag)) store_release(flag, static_cast<uint64_t>(reason));
  }
}

// One waiter's patience: backs off while nothing happens, polls the abort flag, gives up at the deadline.
class Idle {
 public:
  DISTMK_FN Idle(const RankState& state, uint32_t waiter) : state_(state), waiter_(waiter) {}

  DISTMK_FN void reset() { polls_ = 0; }

  // Another poll found nothing. False: leave (`task` may be null where the waiter has no task in hand).
  DISTMK_FN bool wait(const TaskDesc* task, uint64_t iteration) {
    if (polls_++ == 0) since_ns_ = now_ns();
    const bool spinning = polls_ < state_.params->spin_polls;
    if (spinning && polls_ % 64) {
      pause();
      return true;
    }
    if (load_relaxed(state_.abort_flag(state_.program->rank))) {
      record(task, iteration, 0);
      return false;
    }
    const uint64_t idle_ns = now_ns() - since_ns_;
    if (idle_ns > state_.params->deadline_ns) {
      record(task, iteration, 1);
      raise_abort(state_, Abort::HANG);
      return false;
    }
    if (!spinning) give_way(idle_ns > LONG_IDLE_NS);
    return true;
  }

 private:
  static constexpr uint64_t LONG_IDLE_NS = 20000000;
  const RankState& state_;
  uint32_t waiter_;
  uint32_t polls_ = 0;
  uint64_t since_ns_ = 0;

  DISTMK_FN void record(const TaskDesc* task, uint64_t iteration, uint32_t expired) {
    auto* out = reinterpret_cast<WaitRecordABI*>(state_.params->records) + waiter_;
    const Wait* wait = task ? unmet_wait(state_, *task, iteration) : nullptr;
    const uint32_t event = wait ? wait->event : state_.program->gate_event;
    out->worker = waiter_;
    out->task = task ? static_cast<uint32_t>(task - state_.tasks) : NO_EVENT;
    out->order = wait ? task->order : NO_EVENT;
    out->event = event;
    out->want = wait ? wanted(*wait, iteration) : iteration + 1;
    out->got = event == NO_EVENT ? 0 : load_acquire(state_.event(state_.program->rank, event));
    out->expired = expired;
    out->iteration = iteration;
    out->filled = 1;
  }
};

}  // namespace distmk
