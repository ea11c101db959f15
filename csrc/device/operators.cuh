// The loops of the roles in which operators take part, beside the bodies and hooks of their task types. This is the
// only list of operators; megakernel.cuh runs the loops.
#pragma once
#include "device/attention/work_assignment.cuh"
#include "device/core/dispatcher.cuh"
#include "device/core/loader.cuh"
#include "device/jobs/loader.cuh"

namespace distmk {

DISTMK_NOINLINE void loader_loop(const RankState& state) {
  Loader loader(shared().pipeline, shared().at<Overlay::PIPELINE_STAGES>(), shared().num_slabs[0]);
  run_loader(state, loader, attention::InputStream{}, jobs::InputStream{});
}

DISTMK_NOINLINE void dispatcher_loop(const RankState& state, uint32_t worker, const Team warp) {
  run_dispatcher<attention::AssignmentTracker>(state, worker, warp, nullptr);
}
// For a worker whose own scheduler dispatches something. A separate scheduler warp would add a handover between warps,
// which takes longer than this warp's next poll. Workers that dispatch nothing run less code.
DISTMK_NOINLINE void dispatcher_and_scheduler_loop(const RankState& state, uint32_t worker, const Team warp) {
  CachedScheduler local_scheduler(state, worker, warp, CachedTasks::Holder(shared().scheduled));
  run_dispatcher<attention::AssignmentTracker>(state, worker, warp, &local_scheduler);
}

}  // namespace distmk
