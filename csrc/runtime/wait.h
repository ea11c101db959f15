// How workers and schedulers wait: when a task's waits are met, when an iteration may start, and when a wait is given
// up.
#pragma once
#include "runtime/rank_state.h"

namespace distmk {

// The event count that meets `wait` in this iteration. Events only grow: every iteration adds wait.count.
DISTMK_FN uint64_t target_count(const Wait& wait, uint64_t iteration) {
  return wait.count * (iteration + 1 - wait.lag);
}

DISTMK_FN bool is_met(const RankState& state, const Wait& wait, uint64_t iteration) {
  const uint64_t* event = state.event(state.program->rank, wait.event);
  return has_reached(event, target_count(wait, iteration), scope_of(wait.system));
}

// Whether all waits of a task are met in this iteration. The threads of the team share the polls.
DISTMK_FN bool waits_met(const RankState& state, const TaskView& task, uint64_t iteration, const Team& team) {
  bool met = true;
  for (uint32_t w = team.index; met && w < task.desc->num_waits; w += team.size)
    met = is_met(state, task.waits[w], iteration);
  if (!team.all(met)) return false;
  team.sync();  // a warp vote does not order memory
  return true;
}

// waits_met() of two tasks at once: the team polls the events of both in a single round trip to memory. A task without
// a descriptor counts as not met.
struct BothMet {
  bool first, second;
};
DISTMK_FN BothMet both_met(const RankState& state, const TaskView& first, uint64_t first_iteration,
                           const TaskView& second, uint64_t second_iteration, const Team& team) {
  BothMet met{first.desc != nullptr, second.desc != nullptr};
  const uint32_t num_first = met.first ? first.desc->num_waits : 0;
  const uint32_t num_waits = num_first + (met.second ? second.desc->num_waits : 0);
  DISTMK_NO_UNROLL
  for (uint32_t w = team.index; w < num_waits; w += team.size) {
    const bool of_first = w < num_first;
    if (!(of_first ? met.first : met.second)) continue;
    const Wait& wait = of_first ? first.waits[w] : second.waits[w - num_first];
    if (is_met(state, wait, of_first ? first_iteration : second_iteration)) continue;
    (of_first ? met.first : met.second) = false;
  }
  met = {team.all(met.first), team.all(met.second)};
  team.sync();  // a warp vote does not order memory
  return met;
}

enum class IterationBarrier : uint32_t { CLOSED, OPEN, STOP };

// One past the last iteration of this launch. If max_iterations ends the launch, the next launch continues there.
DISTMK_FN uint64_t end_iteration(const LaunchParams& params) {
  return params.max_iterations ? params.first_iteration + params.max_iterations : ~0ull;
}

// Whether the batch metadata of an iteration has arrived in this rank's heap.
DISTMK_FN bool batch_arrived(const RankState& state, uint64_t iteration, const Team& team) {
  const ProgramHeader& program = *state.program;
  const uint64_t* event = state.event(program.rank, program.iteration_event);
  return team.all(has_reached(event, iteration + 1, scope_of(program.num_ranks > 1)));
}

// Whether the iteration may start on this rank. Its batch metadata must have arrived; a program without a batch runs
// the launch's fixed number of iterations. In a worker CTA only the dispatcher polls the heap (CachedTasks::List)
// and caches the batch; the other warps wait for the cached copy.
DISTMK_FN IterationBarrier iteration_barrier_state(const RankState& state, uint64_t iteration, const Team& team) {
  const ProgramHeader& program = *state.program;
  if (iteration == end_iteration(*state.params)) return IterationBarrier::STOP;
  if (program.iteration_event == NO_EVENT)
    return iteration < state.params->num_iterations ? IterationBarrier::OPEN : IterationBarrier::STOP;
  if (state.cached_batch) {
    const uint64_t cached = load_acquire(state.num_cached_batches, Scope::BLOCK);
    if (!team.all(cached >> 1 > iteration)) return IterationBarrier::CLOSED;
    return team.all(cached & 1) ? IterationBarrier::STOP : IterationBarrier::OPEN;
  }
  if (!batch_arrived(state, iteration, team)) return IterationBarrier::CLOSED;
  return reinterpret_cast<const Batch*>(state.address(program.iteration_batch))->stop ? IterationBarrier::STOP
                                                                                      : IterationBarrier::OPEN;
}

// Batch::stop of an iteration that must not start; 0 in a program without a batch.
DISTMK_FN uint32_t stop_of(const RankState& state) {
  if (state.cached_batch) return state.cached_batch->stop;
  const ProgramHeader& program = *state.program;
  if (program.iteration_event == NO_EVENT) return 0;
  return reinterpret_cast<const Batch*>(state.address(program.iteration_batch))->stop;
}

// Sets the abort flag of every rank, so that all workers and schedulers leave.
DISTMK_FN void raise_abort(const RankState& state, Abort reason) {
  for (uint32_t rank = 0; rank < state.program->num_ranks; ++rank) {
    if (state.transport && is_remote(*state.transport, rank)) {
      transport_abort(*state.transport, rank, static_cast<uint64_t>(reason));
      continue;
    }
    uint64_t* flag = state.abort_flag(rank);
    if (!load_relaxed(flag)) store_release(flag, static_cast<uint64_t>(reason), Scope::SYSTEM);
  }
}

// Back-off of a polling loop: it spins at first, then sleeps between polls, and checks the abort flag. At the deadline
// it records the unmet wait and raises the abort flag of every rank, unless rank 0's beat shows that the launch is only
// idle.
class Backoff {
 public:
  // `runner`: the index of a worker, or num_workers + the index of a scheduler.
  DISTMK_FN Backoff(const RankState& state, uint32_t runner, const Team& team)
      : state_(state), runner_(runner), team_(team) {}

  // Called when the loop has made progress.
  DISTMK_FN void reset() { polls_ = 0; }

  // Called after a poll that found nothing. Returns false if the caller must leave. `task` has no descriptor if the
  // loop waits for an iteration to start.
  DISTMK_FN bool wait(const TaskView& task, uint64_t iteration) {
    if (polls_++ == 0) began_ns_ = since_ns_ = last_check_ns_ = now_ns();
    const bool spinning = polls_ < state_.params->spin_polls;
    if (spinning && polls_ % 64) {
      pause();
      return true;
    }
    if (!team_.all(!load_relaxed(state_.abort_flag(state_.program->rank)))) return give_up(task, iteration, 0);
    const uint64_t now = now_ns();
    if (!team_.all(idle_time(now) <= state_.params->deadline_ns || has_beat(now))) return give_up(task, iteration, 1);
    if (!spinning) back_off(now - began_ns_);
    return true;
  }

 private:
  const RankState& state_;
  uint32_t runner_;
  const Team team_;
  uint32_t polls_ = 0;
  uint64_t began_ns_ = 0, since_ns_ = 0, last_check_ns_ = 0;  // start of the wait; start of its deadline; last check
  uint64_t last_beat_ = 0;

  // Time since the first poll that found nothing. A process that was stopped or got no core did not poll meanwhile, so
  // the time between two checks counts for at most a quarter of the deadline.
  DISTMK_FN uint64_t idle_time(uint64_t now) {
    if constexpr (MAY_BE_STOPPED) {
      const uint64_t passed = now - last_check_ns_, most = state_.params->deadline_ns / 4;
      if (passed > most) since_ns_ += passed - most;
      last_check_ns_ = now;
    }
    return now - since_ns_;
  }

  // Whether rank 0's beat has advanced since the last call. If so, the deadline starts anew.
  DISTMK_FN bool has_beat(uint64_t now) {
    const uint64_t beat = load_relaxed(&reinterpret_cast<const Control*>(state_.heap())->beat);
    if (beat == last_beat_) return false;
    last_beat_ = beat;
    since_ns_ = now;
    return true;
  }

  DISTMK_FN bool give_up(const TaskView& task, uint64_t iteration, uint32_t expired) {
    if (!team_.leader()) return false;
    record(task, iteration, expired);
    if (expired) raise_abort(state_, Abort::HANG);
    return false;
  }

  DISTMK_FN const Wait* unmet_wait(const TaskView& task, uint64_t iteration) const {
    for (uint32_t w = 0; task.desc && w < task.desc->num_waits; ++w)
      if (!is_met(state_, task.waits[w], iteration)) return &task.waits[w];
    return nullptr;
  }

  DISTMK_FN void record(const TaskView& task, uint64_t iteration, uint32_t expired) const {
    auto* out = reinterpret_cast<WaitRecordABI*>(state_.params->records) + runner_;
    const Wait* wait = unmet_wait(task, iteration);
    const uint32_t event = wait ? wait->event : state_.program->iteration_event;
    out->worker = runner_;
    out->task = task.desc ? task.index : NO_EVENT;
    out->order = wait ? task.desc->order : NO_EVENT;
    out->event = event;
    out->want = wait ? target_count(*wait, iteration) : iteration + 1;
    out->got = event == NO_EVENT ? 0 : load_acquire(state_.event(state_.program->rank, event));
    out->expired = expired;
    out->iteration = iteration;
    out->program = state_.program->index;
    out->filled = 1;
  }
};

}  // namespace distmk
