// What the consumers do: task after task that the waiter announces, as long as the launch goes on.
#pragma once
#include "device/comm/nvshmem.cuh"
#include "device/core/hot_path.cuh"

namespace distmk {

// The body of the task that this worker is at is done.
DISTMK_FN void end_task(const Context& context, uint64_t pushed) {
  mark(Mark::LEFT);
  TaskHandshake& handshake = shared().handshake;
  const uint32_t n = task_number();
  if (opaque(threadIdx.x) == 0) handshake.pushed[handshake_slot(n)] = pushed;
  __syncwarp();  // all lanes have read the number
  if (threadIdx.x % 32 == 0) shared().task_numbers[threadIdx.x / 32] = n + 1;
  warp_arrive(&handshake.done[handshake_slot(n)]);  // here: what a function puts back when it returns may take a while
}

// What lives across a call would lie on the stack, for which there is hardly any cache. So tasks that every token waits
// for are compiled into the consumers' loop, where no function is called. All others have a function a type, which
// first puts registers that it needs on the stack: few, mostly, where one for all types would put there what the
// largest needs. Of a task that was announced when the launch was over the body does nothing, or nothing that counts,
// and others may come before the one that says so.
template <uint32_t TYPE>
struct BodyOf {  // not a lambda: it might become a function, which is given its context on the stack
  DISTMK_FN void operator()(Context& context) const { run_body_of<TYPE>(context); }
};
// Whoever has put data must wait until it is there. By itself, as it calls NVSHMEM's functions.
DISTMK_NOINLINE void finish_remote(const RankState& state, const Action& action, uint64_t pushed) {
  Context context(state, {threadIdx.x, NUM_CONSUMERS});
  context.begin(action.task, action.iteration, action.instance);
  context.set_pushed(pushed);
  context.finish();
}
template <uint32_t TYPE>
DISTMK_NOINLINE void run_cold_task_of(const RankState& state) {
  constexpr auto type = static_cast<TaskType>(TYPE);
  Context context(state, {threadIdx.x, NUM_CONSUMERS});
  const Action& action = shared().handshake.action[handshake_slot(task_number())];
  const bool ran = run_action(context, action, {true, true}, begins_early(type), BodyOf<TYPE>{});
  if (ran) reset_stale_rows<type>(context);
  if (state.transport && ran) finish_remote(state, action, context.pushed());
  end_task(context, state.transport ? ~0ull : context.pushed());
}

DISTMK_FN void run_cold_task(const RankState& state, uint32_t type) {
  switch (type) {
#define DISTMK_CASE(id, name, Args)                                                      \
  case id:                                                                               \
    if constexpr (!std::is_same_v<Args, SchedulerStepArgs>) run_cold_task_of<id>(state); \
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
  end_task(context, 0);
}

// Bodies end one after another, but warps by themselves: nobody waits for those that still add up or store.
DISTMK_FN void consumer_loop(const RankState& state) {
  TaskHandshake& handshake = shared().handshake;
  for (;;) {
    const uint32_t at = task_number();
    barrier_wait(&handshake.issued[handshake_slot(at)], handshake_phase(at));
    const uint32_t code_path = current_code_path();
    if (code_path == CodePath::LEAVE) break;
    if (code_path >= CodePath::OTHER)
      run_cold_task(state, code_path - CodePath::OTHER);
    else
      run_hot_task(state);
  }
  if (opaque(threadIdx.x)) return;
  handshake.wait_previous(task_number());
  release(shared().ring, shared().consumer[0].stage);
}

}  // namespace distmk
