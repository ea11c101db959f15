// Where workers and schedulers read task descriptors: the program itself. On a GPU device/core/task_queue.cuh takes its
// place, with copies in shared memory; Worker and Scheduler are templates on the source, so that they name neither.
#pragma once
#include "runtime/rank_state.h"

namespace distmk {

struct ProgramTasks {
  // A worker's ahead-of-time list, in order, over and over.
  class List {
   public:
    // Caches the batch metadata of an iteration, once it has arrived. Here it is read in the heap.
    void poll_batch(const RankState&, uint64_t, const Team&) {}
    // The next task of the list, which has this index in the program.
    TaskView next(const RankState& state, uint32_t index) { return state.view(index); }
  };

  // Holds a dispatched task; the one before may still be running.
  class Holder {
   public:
    // The last argument: another holder that may already have the task.
    TaskView take(const RankState& state, uint32_t index, const Team&, const Holder* = nullptr) {
      return state.view(index);
    }
  };
};

}  // namespace distmk
