// What a worker's warps tell each other about the next task.
#pragma once
#include "device/ring.cuh"

namespace distmk {

// The consumers' view of a task that was announced: its waits are met once the barrier is through.
struct StartSignal {
  static constexpr bool EARLY = true;
  uint64_t* ready = nullptr;
  uint32_t number = 0;  // of the task, since the launch began
  const volatile uint32_t* over_at = nullptr;

  // False: the launch is over.
  DISTMK_FN bool wait() const {
    if (!ready) return true;
    barrier_wait(ready, number / 2 % 2);
    return *over_at != number;  // by now it may be over for the next task
  }
};

}  // namespace distmk
