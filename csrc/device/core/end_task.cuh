// How a consumer warp finds its task, and how it leaves it.
#pragma once
#include "device/core/marks.cuh"

namespace distmk {

// The consumers' context of this warp's current task, which was issued before its waits are met and may be revoked.
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
  __syncwarp();  // all lanes have read the number
  if (threadIdx.x % 32 == 0) shared().task_numbers[threadIdx.x / 32] = n + 1;
  // Here, not in the caller: a function on the cold path still has to restore its registers when it returns.
  warp_arrive(&handshake.done[handshake_slot(n)]);
}
// The same at the end of a function that a body calls, whose registers come back from the stack behind all that was
// stored. Pushes nothing; what puts data with a transport is ended by its caller.
DISTMK_FN void end_task_of_body() {
  if (!own_rank_state().transport) end_task(0);
}

}  // namespace distmk
