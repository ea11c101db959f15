// The loader warp's loop: fills the pipeline (pipeline.cuh) for every task of the worker's list that streams, in
// program order, iteration after iteration.
#pragma once
#include "device/core/shared.cuh"

namespace distmk {

// A type with STREAMS_WEIGHTS defines two hooks beside its body, under device/:
//   weight_slab       the slab that the loader streams for a task
//   throttles_signal  whether the loader is throttled while the task's triggers are signaled.
#define DISTMK_DECLARE_HOOKS(id, name, Args)                                  \
  DISTMK_FN WeightSlab weight_slab(const RankState& state, const Args& args); \
  DISTMK_FN bool throttles_signal(const RankState& state, const Args& args);
DISTMK_TASK_TYPES_STREAMS_WEIGHTS(DISTMK_DECLARE_HOOKS)
#undef DISTMK_DECLARE_HOOKS

// Streams the slab of a task, if it has one. Before the descriptor's slot is released, the arguments are copied as if
// the task were of each type that streams weights: that costs less than a branch. False: the worker has left.
DISTMK_FN bool stream_task(const RankState& state, const Team&, Loader& loader, const TaskDesc& task, uint64_t* empty) {
  const uint16_t type = task.type;
#define DISTMK_COPY(id, name, Args) const Args name##_args = args_of<Args>(task);
  DISTMK_TASK_TYPES_STREAMS_WEIGHTS(DISTMK_COPY)
#undef DISTMK_COPY
  warp_arrive(empty);
#define DISTMK_IF(id, name, Args) \
  if (type == id && !loader.stream(weight_slab(state, name##_args))) return loader.leave(), false;
  DISTMK_TASK_TYPES_STREAMS_WEIGHTS(DISTMK_IF)
#undef DISTMK_IF
  return true;
}
// Lets the operator that claims the task stream its inputs. If none does, streams the task's slab. `empty`: the barrier
// of the descriptor's slot.
template <class InputStream, class... Others>
DISTMK_FN bool stream_task(const RankState& state, const Team& lanes, Loader& loader, const TaskDesc& task,
                           uint64_t* empty, InputStream& inputs, Others&... others) {
  if (!inputs.handles(task)) return stream_task(state, lanes, loader, task, empty, others...);
  const bool stays = inputs.stream(state, lanes, loader, task);
  warp_arrive(empty);
  if (!stays) return loader.leave(), false;
  return true;
}

// `InputStreams`: one for each operator whose inputs are not a plain slab (device/operators.cuh). Each has:
//   handles  whether a task belongs to that operator
//   stream   fills shared memory for the task; false: the worker has left.
template <class... InputStreams>
DISTMK_FN void run_loader(const RankState& state, Loader& loader, InputStreams... streams) {
  Shared& s = shared();
  const Team lanes{threadIdx.x % 32, 32};
  for (TaskCursor cursor;; cursor.advance()) {
    while (!lanes.all(barrier_try_wait(&s.tasks.full[cursor.index], cursor.phase)))
      if (!lanes.all(!s.pipeline.leave.get())) return loader.leave();
    const TaskDesc& task = s.tasks.slots[cursor.index].desc;
    if (!stream_task(state, lanes, loader, task, &s.tasks.empty[cursor.index], streams...)) return;
  }
}

}  // namespace distmk
