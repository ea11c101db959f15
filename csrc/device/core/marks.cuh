// Marks: the clock at which each consumer warp passed certain points of its last tasks, for scripts/step_marks.py. They
// compile to nothing unless the kernel is built with -DDISTMK_MARKS.
#pragma once
#include "device/core/shared.cuh"

namespace distmk {

#ifdef DISTMK_MARKS
static_assert(static_cast<uint32_t>(Mark::LEFT) < MARK_WORDS, "");
extern "C" {  // so that the host finds it by its unmangled name
__device__ uint32_t distmk_marks[MARKED_WORKERS][NUM_WARPS][MARKED_TASKS][MARK_WORDS];
}

DISTMK_FN void mark_as(Mark what, uint32_t value) {
  const uint32_t worker = shared().worker_index, warp = threadIdx.x / 32;
  if (worker >= MARKED_WORKERS || threadIdx.x % 32) return;
  distmk_marks[worker][warp][task_number() % MARKED_TASKS][static_cast<uint32_t>(what)] = value;
}
DISTMK_FN void mark(Mark what) { mark_as(what, now_clock()); }
DISTMK_FN void mark_entry(uint32_t task) {
  for (uint32_t i = 0; i <= static_cast<uint32_t>(Mark::LEFT); ++i) mark_as(static_cast<Mark>(i), 0);
  mark_as(Mark::TASK, task + 1);
  mark_as(Mark::TIME, static_cast<uint32_t>(now_ns() / MARK_STEP_NS));
  mark(Mark::ENTERED);
}
#else
DISTMK_FN void mark(Mark) {}
DISTMK_FN void mark_entry(uint32_t) {}
#endif

}  // namespace distmk
