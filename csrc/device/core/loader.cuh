// The loader warp: fills the pipeline for every task of its worker's list that streams, in program order, over and
// over.
#pragma once
#include "device/attention/work_assignment.cuh"
#include "device/core/shared.cuh"

namespace distmk {

DISTMK_FN bool streams_weights(const TaskDesc& task) { return task.type == static_cast<uint16_t>(TaskType::LINEAR); }

DISTMK_NOINLINE void loader_loop(const RankState& state) {
  Shared& s = shared();
  Loader loader(s.ring, s.slots, s.num_slabs[0]);
  const Team lanes{threadIdx.x % 32, 32};
  for (TaskCursor cursor;; cursor.advance()) {
    while (!lanes.all(barrier_try_wait(&s.tasks.full[cursor.index], cursor.phase)))
      if (!lanes.all(!s.ring.leave.get())) return loader.leave();
    const TaskDesc& task = s.tasks.slots[cursor.index].desc;
    if (attention::is_told_of(task)) {
      const bool stays = attention::stream_assignment(state, lanes, loader, task);
      warp_arrive(&s.tasks.empty[cursor.index]);
      if (!stays) return loader.leave();
      continue;
    }
    const bool streams = streams_weights(task);
    const auto args = *reinterpret_cast<const LinearArgs*>(task.args);
    warp_arrive(&s.tasks.empty[cursor.index]);
    if (streams && !loader.stream(args, reinterpret_cast<const char*>(state.address(args.weight))))
      return loader.leave();
  }
}

}  // namespace distmk
