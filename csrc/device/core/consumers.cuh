// The consumer warps' loop: runs the body of each task that the dispatcher issues. Each warp goes through the tasks at
// its own pace. The hot path is in hot_path.cuh, the cold path here.
#pragma once
#include "device/core/end_task.cuh"
#include "device/core/hot_path.cuh"

namespace distmk {

// The cold path has one function per task type, not inlined into the consumers' loop. Values that live across a call
// are on the stack, for which L1 has next to no room, so the hot path (hot_path.cuh) contains no call. A cold function
// first saves the registers that it needs. Most types need few, whereas one function for all types would save as many
// as the largest.
//
// When the launch ends, tasks may still be issued before the code path LEAVE. Their bodies then do nothing that
// matters.
template <uint32_t TYPE>
struct BodyOf {  // not a lambda, which may become a function that takes its context from the stack
  DISTMK_FN void operator()(Context& context) const { run_body_of<TYPE>(context); }
};
// With a transport, the threads that put data also wait for its arrival and signal. This is a function of its own
// because it calls NVSHMEM.
DISTMK_NOINLINE void finish_remote(const RankState& state, const Action& action, uint64_t pushed) {
  Context context(state, {threadIdx.x, NUM_CONSUMERS});
  context.begin(action.task, action.iteration, action.instance);
  context.set_pushed(pushed);
  context.finish();
}
template <uint32_t TYPE>
DISTMK_FN void run_cold_task_here(const RankState& state) {
  Context context(state, {threadIdx.x, NUM_CONSUMERS});
  const Action& action = shared().handshake.action[handshake_slot(task_number())];
  const uint32_t n = task_number();
  mark_entry(action.task.index);
  if (has_nothing_to_do<TYPE>(state, *action.task.desc)) {
    if (state.params->trace_capacity) shared().handshake.record_time(n);
    return end_task(0);  // the signaler signals all ranks
  }
  const bool ran = run_action(context, action, {true, true}, begins_early(TYPE), BodyOf<TYPE>{});
  if (ran) reset_stale_rows<TYPE>(context);
  if (state.transport && ran) finish_remote(state, action, context.pushed());
  if (task_number() == n) end_task(state.transport ? ~0ull : context.pushed());
}

template <uint32_t TYPE>
DISTMK_NOINLINE void run_cold_task_of(const RankState& state) {
  run_cold_task_here<TYPE>(state);
}

// Waits until this warp's next task has been issued, and returns its code path.
DISTMK_FN uint32_t next_code_path() {
  const uint32_t n = task_number();
  barrier_wait(&shared().handshake.issued[handshake_slot(n)], handshake_phase(n));
  return current_code_path();
}

// Runs the tasks of a job iteration (of a row bucket above MAX_ROWS, device/jobs) one after another, as long as their
// types have a prologue. `code_path`: the current task's. They share one function, because a function with many
// registers first saves up to 84 of its caller's. That is 11 MB over all SMs, too much for every operator. Only
// warpgroup products need functions of their own, which call nothing.
DISTMK_NOINLINE void run_job_layers(const RankState& state, uint32_t code_path) {
  for (;; code_path = next_code_path()) switch (code_path) {
#define DISTMK_CASE(id, name, Args)           \
  case CodePath::COLD + id:                   \
    if constexpr (TraitsOf<id>::HAS_PROLOGUE) \
      run_cold_task_here<id>(state);          \
    else                                      \
      return;                                 \
    break;
      DISTMK_TASK_TYPES(DISTMK_CASE)
#undef DISTMK_CASE
      default:
        return;
    }
}

DISTMK_FN void run_cold_task(const RankState& state, uint32_t type) {
  switch (type) {
#define DISTMK_CASE(id, name, Args)                      \
  case id:                                               \
    if constexpr (TraitsOf<id>::HAS_PROLOGUE)            \
      run_job_layers(state, CodePath::COLD + type);      \
    else if constexpr (!TraitsOf<id>::RUNS_ON_SCHEDULER) \
      run_cold_task_of<id>(state);                       \
    break;
    DISTMK_TASK_TYPES(DISTMK_CASE)
#undef DISTMK_CASE
  }
}

DISTMK_FN void run_hot_task(const RankState& state) {
  Context context(state, {threadIdx.x, NUM_CONSUMERS});
  const Action& action = shared().handshake.action[handshake_slot(task_number())];
  TaskView task = action.task;
  task.desc = in_shared(task.desc);
  context.begin(task, action.iteration, action.instance, {true});
  mark_entry(task.index);
  run_hot_body(context);
  end_task(0);
}

DISTMK_NOINLINE bool change_turn();  // device/megakernel.cuh

// Called when the worker has left its program's task lists. Returns whether another program takes the next turn.
DISTMK_NOINLINE bool end_consumers_turn() {
  if (threadIdx.x == 0) {
    shared().handshake.wait_previous(task_number());
    release_until_loader_left(shared().pipeline, shared().consumer[0].stage);
  }
  return change_turn();
}

// No warp waits for the others at the end of a task, although some may still reduce and store.
DISTMK_FN void consumer_loop(const RankState& state) {
  for (;;) {
    const uint32_t code_path = next_code_path();
    if (code_path == CodePath::LEAVE) {
      if (!end_consumers_turn()) return;
    } else if (code_path >= CodePath::COLD)
      run_cold_task(state, code_path - CodePath::COLD);
    else
      run_hot_task(state);
  }
}

}  // namespace distmk
