// What a worker's warps tell each other about the next task.
#pragma once
#include "device/ring.cuh"

namespace distmk {

// The consumers' view of a task that was announced: its waits are met once the barrier is through.
struct StartSignal {
  static constexpr bool EARLY = true;
  uint64_t* ready = nullptr;
  uint64_t* done_before = nullptr;  // all warps have left the task before: what it had in shared memory is free
  uint32_t number = 0;              // of the task, since the launch began
  const Flag* over_at = nullptr;

  // False: the launch is over.
  DISTMK_FN bool wait() const {
    if (!ready) return true;
    barrier_wait(ready, number / 2 % 2);
    if (over_at->get() == number) return false;  // by now it may be over for the next task
    if (done_before) barrier_wait(done_before, (number - 1) / 2 % 2);
    return true;
  }
};

}  // namespace distmk
