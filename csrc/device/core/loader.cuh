// The loader warp: fills the pipeline for every task of its worker's list that streams, in program order, over and
// over.
#pragma once
#include "device/core/shared.cuh"

namespace distmk {

// A type with STREAMS_WEIGHTS defines beside its body, under device/:
//   weight_slab       the slab that the loader streams for a task
//   throttles_signal  whether the loader is throttled while the task's triggers are signaled
#define DISTMK_DECLARE_HOOKS(id, name, Args)                                  \
  DISTMK_FN WeightSlab weight_slab(const RankState& state, const Args& args); \
  DISTMK_FN bool throttles_signal(const RankState& state, const Args& args);
DISTMK_TASK_TYPES_STREAMS_WEIGHTS(DISTMK_DECLARE_HOOKS)
#undef DISTMK_DECLARE_HOOKS

// The slab of a task, if it has one. The arguments are copied as those of every type that streams weights, which costs
// less than a branch, before the slot is released. False: the worker has left.
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
// The inputs of a task, by the operator whose it is; `empty`: the barrier of its slot.
template <class InputStream, class... Others>
DISTMK_FN bool stream_task(const RankState& state, const Team& lanes, Loader& loader, const TaskDesc& task,
                           uint64_t* empty, InputStream& inputs, Others&... others) {
  if (!inputs.is_told_of(task)) return stream_task(state, lanes, loader, task, empty, others...);
  const bool stays = inputs.stream(state, lanes, loader, task);
  warp_arrive(empty);
  if (!stays) return loader.leave(), false;
  return true;
}

// `InputStreams`: of operators whose tasks' inputs come otherwise than as a slab (device/operators.cuh). Each has
//   is_told_of  whether a task is one of those
//   stream      fills shared memory for it; false: the worker has left
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
