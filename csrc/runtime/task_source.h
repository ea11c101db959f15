// Where workers and schedulers get the tasks they look at: the program itself, or on a GPU copies in shared memory.
#pragma once
#include "platform/platform.h"
#ifdef DISTMK_GPU
#include "device/core/task_queue.cuh"
#else
#include "runtime/context.h"

namespace distmk {

// Holds one task that was handed out.
class TaskHolder {
 public:
  // `also`: a holder at hand that may hold it, too.
  TaskView take(const RankState& state, uint32_t index, const Team&, const TaskHolder* = nullptr) {
    return state.view(index);
  }
};

// A worker's ahead-of-time list, task after task, over and over.
class TaskList {
 public:
  void poll_batch(const RankState&, uint64_t, const Team&) {}
  TaskView next(const RankState& state, uint32_t index) { return state.view(index); }
};

}  // namespace distmk
#endif
