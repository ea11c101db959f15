// What a worker's warps tell each other about the next task.
#pragma once
#include "device/ring.cuh"

namespace distmk {

// The consumers' view of a task that was announced: its waits are met once the barrier is through.
struct StartSignal {
  static constexpr bool EARLY = true;
  uint64_t* ready = nullptr;
  uint32_t parity = 0;
  const volatile uint32_t* over = nullptr;

  // False: the launch is over.
  DISTMK_FN bool wait() const {
    if (!ready) return true;
    barrier_wait(ready, parity);
    return !*over;
  }
};

}  // namespace distmk
