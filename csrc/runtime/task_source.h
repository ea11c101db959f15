// Where workers and schedulers read task descriptors: on the host twin straight from the program. On a GPU
// device/core/task_queue.cuh takes this file's place and keeps copies in shared memory. Worker and Scheduler are
// templates on the source, so they name neither.
#pragma once
#include "runtime/rank_state.h"

namespace distmk {

struct ProgramTasks {
  // A worker's ahead-of-time list, read in order, once per iteration.
  class List {
   public:
    // Caches the batch metadata of an iteration once it has arrived. The host twin reads it in the heap, so there is
    // nothing to do.
    void poll_batch(const RankState&, uint64_t, const Team&) {}
    // The next task of the list; `index` is its index in the program.
    TaskView next(const RankState& state, uint32_t index) { return state.view(index); }
  };

  // Holds the descriptor of a dispatched task while the task before it may still be running.
  class Holder {
   public:
    // The last argument is another holder, which may already have the task.
    TaskView take(const RankState& state, uint32_t index, const Team&, const Holder* = nullptr) {
      return state.view(index);
    }
  };
};

}  // namespace distmk
