// The persistent kernel: one launch per GPU serves a whole generation. Each CTA is a worker on an SM of its own. Its
// warps have roles, each in a file under core/; operators.cuh lists what operators add to them.
//   warps 0-7  consumers.cuh   run the task bodies.
//   warp 8     loader.cuh      streams weights through the pipeline; never waits for an event.
//   warp 9     dispatcher.cuh  polls the events of the next task while one runs; issues tasks to the consumers.
//   warp 10    signaler.cuh    prefetches task descriptors; signals the triggers of tasks that are done.
//   warp 11    scheduler.cuh   dispatches, unless the dispatcher or a CTA of schedulers does it.
// A CTA of schedulers, if there is one, comes after the workers and has one scheduler per warp. The roles share the
// structures of shared.cuh: the pipeline (pipeline.cuh), the task queue (task_queue.cuh) and the handshake
// (handshake.cuh).
//
// A launch may have several programs, for different numbers of rows. A turn is a sequence of iterations of one program.
#pragma once
#include <cstddef>
#include <new>

#include "device/comm/nvshmem.cuh"
#include "device/core/consumers.cuh"
#include "device/core/scheduler.cuh"
#include "device/core/signaler.cuh"
#include "device/core/worker_index.cuh"
#include "device/operators.cuh"
#include "runtime/program_choice.h"

namespace distmk {

enum Role : uint32_t { LOADER = NUM_WARPS, DISPATCHER, SIGNALER, SCHEDULER, NUM_ROLES };
constexpr uint32_t NUM_THREADS = 32 * NUM_ROLES;
static_assert(MAX_OWN_SCHEDULERS == NUM_ROLES, "one CTA runs them, each in a warp");

// Sets what holds for the whole launch. One thread calls it.
DISTMK_FN void begin_launch(const LaunchParams* launch) {
  Shared& s = shared();
  // Copies all words except the ones that a worker writes when it is done.
  constexpr uint32_t NUM_WORDS = offsetof(LaunchParams, iterations_done) / sizeof(uint64_t);
#pragma unroll
  for (uint32_t i = 0; i < NUM_WORDS; ++i)
    reinterpret_cast<uint64_t*>(&s.params)[i] = reinterpret_cast<const uint64_t*>(launch)[i];
  const auto& header = *reinterpret_cast<const ProgramHeader*>(s.params.program);
  s.worker_index = take_worker_index(s.params, header.num_workers + (s.params.scheduler_threads ? 1 : 0));
  for (uint32_t rank = 0; rank < header.num_ranks; ++rank)
    s.heap_bases[rank] = reinterpret_cast<const uint64_t*>(s.params.heap_bases)[rank];
}

// Initializes what all roles share, for the turn of a program. One thread calls it.
DISTMK_FN void set_up() {
  Shared& s = shared();
  s.header = *reinterpret_cast<const ProgramHeader*>(s.params.program);
  s.batch.stop = GOES_ON;
  auto* state = new (s.state_memory)
      RankState(&s.params, reinterpret_cast<uint64_t*>(s.params.faults_seen), &s.header, s.heap_bases);
  if (s.params.num_remote_ranks) state->transport = new (s.transport_memory) Transport(*state);
  if (s.worker_index < s.header.num_workers) {
    if (s.header.iteration_event != NO_EVENT) {
      state->cached_batch = &s.batch;
      state->num_cached_batches = &s.num_batches;
    }
    if (!s.params.scheduler_threads && s.header.num_schedulers == s.header.num_workers &&
        s.header.jit_capacity <= LOCAL_RING_ENTRIES)
      state->local_ring = &s.local_ring.ring;
  }
  s.dispatcher_schedules = state->local_ring && has_launches(*state, s.worker_index);
  s.local_ring.ring = {};
  s.pipeline.init();
  s.tasks.init();
  s.handshake.init();
  s.split_k.init();
  for (ConsumerState& consumer : s.consumer) consumer = {};
  for (Flag& number : s.num_slabs) number = {0};
  for (uint32_t& number : s.task_numbers) number = 0;
  s.attention_assignment.init();
  barrier_init(&s.product_entered, WARP_ARRIVALS);
  s.num_batches = s.attention_schedule = 0;
}

// All threads call it at the end of their role's loop. Returns whether another program takes the next turn. If so,
// everything that the roles share has been set up for it.
DISTMK_NOINLINE bool change_turn() {
  Shared& s = shared();
  __syncwarp();     // lanes of a warp may arrive at different times
  __syncthreads();  // no role gives up shared memory while another uses it
  const uint32_t stop = s.batch.stop;
  if (stop < ENDS_TURN) return false;
  __syncthreads();  // all have read `stop`
  if (threadIdx.x == 0) {
    begin_turn(s.params, stop - ENDS_TURN);
    set_up();
  }
  __syncthreads();
  return true;
}

}  // namespace distmk

// `launch` is in memory that the host can read while the kernel runs. The loops of all roles except the consumers are
// functions that are not inlined. So the consumers have all registers, and the loader's few instructions are
// contiguous. Each role loops over turns by itself: a loop around all roles would cost the consumers registers.
extern "C" __global__ void __launch_bounds__(distmk::NUM_THREADS, 1)
    distmk_megakernel(const distmk::LaunchParams* launch) {
  using namespace distmk;
  Shared& s = shared();
  const RankState& state = own_rank_state();
  check_shared();
  if (threadIdx.x == 0) {
    begin_launch(launch);
    set_up();
  }
  __syncthreads();
  const uint32_t num_workers = s.header.num_workers, num_schedulers = s.header.num_schedulers;
  const uint32_t role = threadIdx.x / 32;
  const Team warp{threadIdx.x % 32, 32};
  const uint32_t block = s.worker_index;
  const bool is_worker = block < num_workers, schedulers_in_workers = !s.params.scheduler_threads;
  if (!is_worker || role == SCHEDULER) {
    const uint32_t id = is_worker ? block : role;
    // The schedulers' own CTA has no use for the pipeline, so its stages hold their tasks.
    TaskSlot* slots = is_worker ? s.scheduled : shared().at<Overlay::SCHEDULER_TASKS, TaskSlot>() + 2 * role;
    do {
      if (is_worker == schedulers_in_workers && id < num_schedulers && !s.dispatcher_schedules)
        scheduler_loop(state, id, warp, slots);
    } while (change_turn());
  } else if (role < NUM_WARPS) {
    consumer_loop(state);
  } else if (role == LOADER) {
    do loader_loop(state);
    while (change_turn());
  } else if (role == DISPATCHER) {
    do {
      if (s.dispatcher_schedules)
        dispatcher_and_scheduler_loop(state, block, warp);
      else
        dispatcher_loop(state, block, warp);
    } while (change_turn());
  } else {
    do signaler_loop(state, block, warp);
    while (change_turn());
  }
}
