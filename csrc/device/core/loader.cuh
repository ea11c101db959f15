// The loader warp: fills the pipeline for every task of its worker's list that streams, in program order, over and
// over.
#pragma once
#include "device/attention/work_assignment.cuh"
#include "device/core/shared.cuh"
#include "device/wide/loader.cuh"

namespace distmk {

// A type with STREAMS_WEIGHTS defines beside its body, under device/:
//   weight_slab       the slab that the loader streams for a task
//   throttles_signal  whether the loader is throttled while the task's triggers are signaled
#define DISTMK_DECLARE_HOOKS(id, name, Args)                                  \
  DISTMK_FN WeightSlab weight_slab(const RankState& state, const Args& args); \
  DISTMK_FN bool throttles_signal(const RankState& state, const Args& args);
DISTMK_TASK_TYPES_STREAMS_WEIGHTS(DISTMK_DECLARE_HOOKS)
#undef DISTMK_DECLARE_HOOKS

DISTMK_NOINLINE void loader_loop(const RankState& state) {
  Shared& s = shared();
  Loader loader(s.pipeline, shared().at<Overlay::PIPELINE_STAGES>(), s.num_slabs[0]);
  const Team lanes{threadIdx.x % 32, 32};
  uint32_t num_products = 0;
  for (TaskCursor cursor;; cursor.advance()) {
    while (!lanes.all(barrier_try_wait(&s.tasks.full[cursor.index], cursor.phase)))
      if (!lanes.all(!s.pipeline.leave.get())) return loader.leave();
    const TaskDesc& task = s.tasks.slots[cursor.index].desc;
    if (attention::is_told_of(task)) {
      const bool stays = attention::stream_assignment(state, lanes, loader, task);
      warp_arrive(&s.tasks.empty[cursor.index]);
      if (!stays) return loader.leave();
      continue;
    }
    if (wide::is_told_of(task)) {
      const bool stays = wide::stream_product(state, lanes, task, num_products++);
      warp_arrive(&s.tasks.empty[cursor.index]);
      if (!stays) return loader.leave();
      continue;
    }
    // The arguments are copied as those of every type that streams, which costs less than a branch, and the slot
    // released.
    const uint16_t type = task.type;
#define DISTMK_COPY(id, name, Args) const Args name##_args = args_of<Args>(task);
    DISTMK_TASK_TYPES_STREAMS_WEIGHTS(DISTMK_COPY)
#undef DISTMK_COPY
    warp_arrive(&s.tasks.empty[cursor.index]);
#define DISTMK_IF(id, name, Args) \
  if (type == id && !loader.stream(weight_slab(state, name##_args))) return loader.leave();
    DISTMK_TASK_TYPES_STREAMS_WEIGHTS(DISTMK_IF)
#undef DISTMK_IF
  }
}

}  // namespace distmk
