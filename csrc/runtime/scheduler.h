// A scheduler hands out tasks chosen at run time. It owns the workers w with w % num_schedulers == id, decides from
// what it sees on its own rank, and never blocks: step() does what can be done now and returns.
#pragma once
#include "runtime/jit_ring.h"
#include "runtime/splits.h"
#include "runtime/trace.h"
#include "runtime/wait.h"

namespace distmk {

class Scheduler {
 public:
  DISTMK_FN Scheduler(const RankState& state, uint32_t id, const Team& one)
      : state_(state), context_(state, one), tracer_(state, state.program->num_workers + id), id_(id) {}

  DISTMK_FN bool done() const { return done_; }
  DISTMK_FN uint64_t iteration() const { return iteration_; }
  // The task in hand; null while the iteration may not start yet.
  DISTMK_FN const TaskDesc* waiting_for() const {
    const TaskDesc* task = next_task();
    return task && (gate_passed_ || task->launch == static_cast<uint16_t>(LaunchKind::SCHEDULER)) ? task : nullptr;
  }

  // True: something was done.
  DISTMK_FN bool step() {
    if (done_) return false;
    const TaskDesc* task = next_task();
    if (task && task->launch == static_cast<uint16_t>(LaunchKind::SCHEDULER)) return run_here(*task);
    if (!gate_passed_) {
      const Gate gate = gate_state(state_, iteration_);
      if (gate == Gate::CLOSED) return false;
      if (gate == Gate::STOP) {
        close();
        return true;
      }
      gate_passed_ = true;
    }
    if (!task) {
      ++iteration_;
      launch_ = 0;
      gate_passed_ = false;
      return true;
    }
    return hand_out(*task);
  }

 private:
  const RankState& state_;
  Context context_;
  Tracer tracer_;
  uint32_t id_;
  bool done_ = false;
  uint64_t iteration_ = 0;
  uint32_t launch_ = 0;         // next entry of the rank's launch list
  uint32_t next_instance_ = 0;  // of a massive launch that is under way
  uint32_t num_instances_ = 0;
  uint32_t num_pushed_ = 0;
  uint64_t start_ns_ = 0;
  bool under_way_ = false;
  bool gate_passed_ = false;

  DISTMK_FN const TaskDesc* next_task() const {
    return launch_ < state_.program->num_launches ? &state_.tasks[state_.launches[launch_]] : nullptr;
  }

  // Tells this scheduler's workers that nothing more will come.
  DISTMK_FN void close() {
    done_ = true;
    for (uint32_t worker = id_; worker < state_.program->num_workers; worker += state_.program->num_schedulers)
      store_release(&state_.ring(worker)->closed, 1);
  }

  DISTMK_FN bool run_here(const TaskDesc& task) {
    if (id_ == 0) {
      if (unmet_wait(state_, task, iteration_)) return false;
      context_.task = &task;
      context_.iteration = iteration_;
      const uint64_t start_ns = tracer_.now();
      run_body(context_);
      const uint64_t body_end_ns = tracer_.now();
      context_.finish();
      tracer_.keep(context_, start_ns, body_end_ns);
    }
    ++launch_;
    return true;
  }

  DISTMK_FN bool hand_out(const TaskDesc& task) {
    const bool massive = task.launch == static_cast<uint16_t>(LaunchKind::MASSIVE);
    const uint32_t num_schedulers = state_.program->num_schedulers;
    if (!massive && launch_ % num_schedulers != id_) {
      ++launch_;
      return true;
    }
    if (!under_way_) {
      if (unmet_wait(state_, task, iteration_)) return false;
      start_ns_ = tracer_.now();
      num_instances_ = massive ? num_instances(context_, task) : 1;
      next_instance_ = num_pushed_ = 0;
      under_way_ = true;
    }
    const uint32_t num_workers = state_.program->num_workers;
    for (; next_instance_ < num_instances_; ++next_instance_) {
      // A single task goes to a worker of this scheduler; instances go round all workers, each pushed by its owner.
      const uint32_t worker = massive ? (next_instance_ + launch_) % num_workers : id_;
      if (worker % num_schedulers != id_) continue;
      const JitEntry entry{state_.launches[launch_], static_cast<uint32_t>(iteration_), next_instance_, 0};
      if (!ring_push(state_.ring(worker), state_.program->jit_capacity, entry)) return false;
      ++num_pushed_;
    }
    // Every scheduler answers for `max_instances`, so that the event also says that each has read the batch.
    context_.task = &task;
    context_.iteration = iteration_;
    const uint64_t pushed_ns = tracer_.now();
    if (massive) context_.finish_unused(task.max_instances - num_pushed_);
    tracer_.keep(context_, start_ns_, pushed_ns);
    under_way_ = false;
    ++launch_;
    return true;
  }
};

// The life of a scheduler that has a thread or a warp of its own.
DISTMK_FN void run_scheduler(const RankState& state, uint32_t id, Scheduler& scheduler) {
  Idle idle(state, state.program->num_workers + id);
  while (!scheduler.done()) {
    if (scheduler.step())
      idle.reset();
    else if (!idle.wait(scheduler.waiting_for(), scheduler.iteration()))
      break;
  }
}

}  // namespace distmk
