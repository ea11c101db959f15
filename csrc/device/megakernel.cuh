// The kernel: one launch a GPU for a whole generation. A worker is a CTA on an SM of its own:
//   warps 0-7   consumers: one thread waits and signals, all run the bodies
//   warp 8      loader: streams this worker's weight slabs, never waits for an event
//   warp 9      scheduler, where schedulers ride in worker CTAs
// or, where schedulers have an SM of their own, the CTA behind the workers runs them, one a warp.
#pragma once
#include <new>

#include "device/far_ranks.cuh"
#include "device/shared.cuh"
#include "runtime/worker.h"

namespace distmk {

constexpr uint32_t LOADER_WARP = NUM_WARPS;
constexpr uint32_t SCHEDULER_WARP = NUM_WARPS + 1;
constexpr uint32_t NUM_THREADS = 32 * (NUM_WARPS + 2);

DISTMK_FN void load_loop(const RankState& state, uint32_t worker) {
  const Queue queue = state.queues[worker];
  Loader loader(shared().ring, shared().slots);
  bool any = false;
  do {
    for (uint32_t t = 0; t < queue.count; ++t) {
      const TaskDesc& task = state.tasks[queue.begin + t];
      if (!streams_weights(task)) continue;
      any = true;
      const auto& args = *reinterpret_cast<const LinearArgs*>(task.args);
      if (!loader.stream(args, reinterpret_cast<const char*>(state.address(args.weight)))) return loader.drain();
    }
  } while (any);
}

// Apart from the kernel, so that the workers' code has all registers.
static __device__ __noinline__ void schedule_loop(const RankState& state, uint32_t id) {
  Scheduler scheduler(state, id, Team{0, 1});
  run_scheduler(state, id, scheduler);
}

DISTMK_FN void consume_loop(const RankState& state, uint32_t worker) {
  const Team team{threadIdx.x, NUM_CONSUMERS};
  Context context(state, team);
  Worker decide(state, worker, nullptr);
  Tracer tracer(state, worker);
  for (;;) {
    if (team.leader()) shared().action = decide.next();
    team.sync();
    const Action action = shared().action;
    if (action.kind == ActionKind::LEAVE) break;
    run_task(context, action, tracer);
  }
  if (!team.leader()) return;
  shared().ring.leave = 1;
  if (worker == 0) {
    const uint64_t reason = load_relaxed(state.abort_flag(state.program->rank));
    if (reason) raise_abort(state, static_cast<Abort>(reason));  // the host told this rank alone
    store_relaxed(&reinterpret_cast<LaunchParams*>(state.params->self)->iterations_done, decide.iterations());
  }
}

}  // namespace distmk

// `launch` lies in memory that the host can read while the kernel runs.
extern "C" __global__ void __launch_bounds__(distmk::NUM_THREADS, 1)
    distmk_megakernel(const distmk::LaunchParams* launch) {
  using namespace distmk;
  __shared__ LaunchParams params;
  __shared__ __align__(16) char state_memory[sizeof(RankState)], far_memory[sizeof(FarRanks)];
  const RankState& state = *reinterpret_cast<const RankState*>(state_memory);
  if (threadIdx.x == 0) {
    params = *launch;
    auto* made = new (state_memory) RankState(&params, reinterpret_cast<uint64_t*>(params.faults_seen));
    if (params.num_far) made->far = new (far_memory) FarRanks(*made);
    shared().ring.init();
    shared().next_stage = 0;
  }
  __syncthreads();
  const uint32_t num_workers = state.program->num_workers, num_schedulers = state.program->num_schedulers;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (blockIdx.x >= num_workers) {
    const uint32_t id = (blockIdx.x - num_workers) * (NUM_THREADS / 32) + warp;
    if (lane == 0 && id < num_schedulers) schedule_loop(state, id);
  } else if (warp < NUM_WARPS) {
    consume_loop(state, blockIdx.x);
  } else if (lane < LOADER_LANES && warp == LOADER_WARP) {
    load_loop(state, blockIdx.x);
  } else if (lane == 0 && warp == SCHEDULER_WARP && !params.scheduler_threads && blockIdx.x < num_schedulers) {
    schedule_loop(state, blockIdx.x);
  }
  __syncthreads();  // nobody gives up shared memory while another role uses it
}
