// How a consumer warp begins and ends its current task in the handshake (handshake.cuh).
#pragma once
#include "device/core/marks.cuh"

namespace distmk {

// Begins a consumer's context for this warp's current task, which was issued before its waits are met and may be
// revoked.
DISTMK_FN void begin_current(Context& context) {
  const Action& action = shared().handshake.action[handshake_slot(task_number())];
  context.begin(action.task, action.iteration, action.instance, {true, true});
}

// This warp has ended the body of its current task. `pushed`: see Context::pushed.
DISTMK_FN void end_task(uint64_t pushed) {
  mark(Mark::LEFT);
  TaskHandshake& handshake = shared().handshake;
  const uint32_t n = task_number();
  if (opaque(threadIdx.x) == 0) handshake.pushed[handshake_slot(n)] = pushed;
  __syncwarp();  // all lanes have read the task number
  if (threadIdx.x % 32 == 0) shared().task_numbers[threadIdx.x / 32] = n + 1;
  // The warp arrives here, not in the caller, because a function on the cold path still has to restore its registers
  // when it returns.
  warp_arrive(&handshake.done[handshake_slot(n)]);
}
// end_task() for a body that works in a function which it calls. The function ends the task itself, because restoring
// its caller's registers from the stack queues behind all of its stores. Such a body pushes nothing. With a transport,
// the caller ends the task.
DISTMK_FN void end_task_of_body() {
  if (!own_rank_state().transport) end_task(0);
}

}  // namespace distmk
