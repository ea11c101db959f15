// The kernel: one launch a GPU for a whole generation. A worker is a CTA on an SM of its own:
//   warps 0-7   consumers: run the bodies
//   warp 8      loader: streams this worker's weight slabs, never waits for an event
//   warp 9      waiter: polls the events of the next task while one runs, and hands it to the consumers; is its
//               worker's scheduler where that has something to hand out
//   warp 10     clerk: copies the worker's tasks to shared memory ahead of time, and fires what they trigger
//   warp 11     scheduler else, where schedulers ride in worker CTAs
// or, where schedulers have an SM of their own, the CTA behind the workers runs them, one a warp.
#pragma once
#include <cstddef>
#include <new>

#include "device/core/consumers.cuh"
#include "device/core/scheduler_step.cuh"
#include "device/core/worker_index.cuh"

namespace distmk {

enum Role : uint32_t { LOADER = NUM_WARPS, DISPATCHER, SIGNALER, SCHEDULER, NUM_ROLES };
constexpr uint32_t NUM_THREADS = 32 * NUM_ROLES;
static_assert(MAX_OWN_SCHEDULERS == NUM_ROLES, "one CTA runs them, each in a warp");

// The roles but the consumers' are functions of their own: the consumers then have all registers, and the loader's few
// instructions lie together.
DISTMK_NOINLINE void load_loop(const RankState& state) {
  Shared& s = shared();
  Loader loader(s.ring, s.slots, s.num_slabs[0]);
  const Team lanes{threadIdx.x % 32, 32};
  for (TaskCursor cursor;; cursor.advance()) {
    while (!lanes.all(barrier_try_wait(&s.tasks.full[cursor.index], cursor.phase)))
      if (!lanes.all(!s.ring.leave.get())) return loader.leave();
    const TaskDesc& task = s.tasks.slots[cursor.index].desc;
    if (attention::is_told_of(task)) {
      const bool goes_on = attention::stream_assignment(state, lanes, loader, task);
      warp_arrive(&s.tasks.empty[cursor.index]);
      if (!goes_on) return loader.leave();
      continue;
    }
    const bool streams = streams_weights(task);
    const auto args = *reinterpret_cast<const LinearArgs*>(task.args);
    warp_arrive(&s.tasks.empty[cursor.index]);
    if (streams && !loader.stream(args, reinterpret_cast<const char*>(state.address(args.weight))))
      return loader.leave();
  }
}

DISTMK_NOINLINE void scheduler_loop(const RankState& state, uint32_t id, const Team warp, TaskSlot* slots) {
  Scheduler scheduler(state, id, warp, TaskHolder(slots));
  run_scheduler(state, id, warp, scheduler);
}

// `rider`: where it has one, nothing is known ahead, as something may be handed out in between. What is likely is
// announced all the same, and taken back if something else comes.
template <class Rider>
DISTMK_FN void run_dispatcher(const RankState& state, uint32_t worker, const Team& warp, Rider local_scheduler) {
  constexpr bool KNOWS_AHEAD = std::is_same_v<Rider, std::nullptr_t>;
  Shared& s = shared();
  uint32_t n = 0;
  const TaskList list(s.tasks, s.batch, s.num_batches, s.handshake.signaled, n);
  Worker decide(state, worker, warp, list, TaskHolder(s.dispatched), local_scheduler);
  attention::AssignmentTracker share(state, warp);
  uint32_t num_announced = 0;
  const auto issue = [&](const Action& what) {
    share.see(num_announced, what);
    s.handshake.issue(warp, num_announced++, what, code_path_of(state, what));
  };
  const auto turn_to_next = [&] {
    if (n) barrier_wait(&s.handshake.signaled[handshake_slot(n - 1)], handshake_phase(n - 1));
    ++n;
  };
  for (;;) {
    Action ahead;
    if (KNOWS_AHEAD && num_announced == n && decide.peek(&ahead)) issue(ahead);
    if (KNOWS_AHEAD && num_announced == n + 1 && decide.peek_second(&ahead)) issue(ahead);
    if (KNOWS_AHEAD && num_announced == n + 2 && decide.peek_third(&ahead) && ahead.task.desc->deep_lookahead)
      issue(ahead);
    const Action action = decide.next();
    if (!KNOWS_AHEAD && num_announced > n && action.kind == ActionKind::RUN) {
      s.handshake.revoke(warp, n);
      turn_to_next();
    }
    const bool leaves = action.kind == ActionKind::LEAVE, was_announced = num_announced > n;
    if (!was_announced) issue(action);
    if (!KNOWS_AHEAD && action.kind == ActionKind::SPECULATE) continue;
    if (warp.leader() && leaves) s.handshake.end_at.set(n);
    warp_arrive(&s.handshake.ready[handshake_slot(n)]);
    turn_to_next();
    if (!leaves) continue;
    // To who did not ask, as his inputs had lamport_value.
    for (; n < num_announced; ++n) warp_arrive(&s.handshake.ready[handshake_slot(n)]);
    if (was_announced) issue(action);
    break;
  }
  if (worker || !warp.leader()) return;
  const uint64_t reason = load_relaxed(state.abort_flag(state.program->rank));
  if (reason) raise_abort(state, static_cast<Abort>(reason));  // the host told this rank alone
  store_relaxed(&reinterpret_cast<LaunchParams*>(state.params->self)->iterations_done, decide.iterations());
}

DISTMK_NOINLINE void dispatch_loop(const RankState& state, uint32_t worker, const Team warp) {
  run_dispatcher(state, worker, warp, nullptr);
}
// Where a worker's own scheduler has something to hand out: between two warps it would take as long as to this one's
// next look at an event, and longer. What never hands out anything has less code.
DISTMK_NOINLINE void dispatch_and_schedule_loop(const RankState& state, uint32_t worker, const Team warp) {
  Scheduler local_scheduler(state, worker, warp, TaskHolder(shared().scheduled));
  run_dispatcher(state, worker, warp, &local_scheduler);
}

DISTMK_FN bool throttles_loader(const RankState& state, const TaskDesc& task) {
  return !streams_weights(task) || linear::throttles_loader(state, *reinterpret_cast<const LinearArgs*>(task.args));
}

// Whether what a task's body has seen says as much as its waits: of more than a tile of rows those that it waits for
// have waited before they wrote.
DISTMK_FN bool skips_waits(const Context& context, const TaskDesc& task) {
  if (task.type != static_cast<uint16_t>(TaskType::SUM)) return false;
  const auto& args = *reinterpret_cast<const SumArgs*>(task.args);
  return sum_polls(context.rank_state, args) && rows_of(context.batch(args.batch)) > N_TILE;
}

// Whether the clerk may fire task `n`, whose body is done. The waits of those before are met by then, too: their slots
// of the task ring are given back.
DISTMK_FN bool may_fire(const Context& context, TaskHandshake& handshake, uint32_t n) {
  if (skips_waits(context, *handshake.action[handshake_slot(n)].task.desc))
    return context.team.all(!n || handshake.is_ready(n - 1));
  return context.team.all(handshake.is_ready(n) && !handshake.is_ended(n));
}

// Fires a task's triggers as soon as its body is done and its waits are met: the consumers go on meanwhile.
DISTMK_NOINLINE void signal_loop(const RankState& state, uint32_t worker, const Team warp) {
  Shared& s = shared();
  TaskHandshake& handshake = s.handshake;
  TaskPrefetcher fetcher(state, state.queues[worker], s.tasks);
  Context context(state, warp);
  Tracer tracer(state, worker);
  bool last_was_listed = false;
  uint64_t body_end_ns = 0;
  for (uint32_t n = 0;;) {
    const bool leaving = !warp.all(!s.ring.leave.get());
    if (warp.leader() && handshake.end_at.get() != ~0u) s.ring.throttle.set(0);  // for what will never be fired
    const bool done = warp.all(barrier_test(&handshake.done[handshake_slot(n)], handshake_phase(n)));
    if (done && !body_end_ns) body_end_ns = tracer.now();
    if (done && may_fire(context, handshake, n)) {
      if (!handshake.is_revoked(n)) {
        const Action& action = handshake.action[handshake_slot(n)];
        context.begin(action.task, action.iteration, action.instance);
        context.set_pushed(handshake.pushed[handshake_slot(n)]);
        if (warp.leader() && throttles_loader(state, *action.task.desc)) s.ring.throttle.set(1);
        context.finish();
        tracer.keep(context, handshake.ready_ns[handshake_slot(n)], body_end_ns);
        if (last_was_listed) fetcher.give_back();
        last_was_listed = action.kind == ActionKind::RUN;
      }
      warp.sync();
      if (warp.leader()) s.ring.throttle.set(0);
      warp_arrive(&handshake.signaled[handshake_slot(n)]);
      body_end_ns = 0;
      ++n;
    } else if (leaving) {
      return;
    } else if (fetcher.has_room()) {
      fetcher.fetch(warp);
    }
  }
}

// One thread: what all roles share.
DISTMK_FN void set_up(const LaunchParams* launch) {
  Shared& s = shared();
  // All but what a worker that is done writes there.
  constexpr uint32_t NUM_WORDS = offsetof(LaunchParams, iterations_done) / sizeof(uint64_t);
#pragma unroll
  for (uint32_t i = 0; i < NUM_WORDS; ++i)
    reinterpret_cast<uint64_t*>(&s.params)[i] = reinterpret_cast<const uint64_t*>(launch)[i];
  s.header = *reinterpret_cast<const ProgramHeader*>(s.params.program);
  s.worker_index = take_worker_index(s.params, s.header.num_workers + (s.params.scheduler_threads ? 1 : 0));
  for (uint32_t rank = 0; rank < s.header.num_ranks; ++rank)
    s.heap_bases[rank] = reinterpret_cast<const uint64_t*>(s.params.heap_bases)[rank];
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
  s.ring.init();
  s.tasks.init();
  s.handshake.init();
  s.sums.init();
  for (ConsumerState& consumer : s.consumer) consumer = {};
  for (Flag& number : s.num_slabs) number = {0};
  for (uint32_t& number : s.task_numbers) number = 0;
  s.attention_assignment.init();
  s.num_batches = 0;
}

}  // namespace distmk

// `launch` lies in memory that the host can read while the kernel runs.
extern "C" __global__ void __launch_bounds__(distmk::NUM_THREADS, 1)
    distmk_megakernel(const distmk::LaunchParams* launch) {
  using namespace distmk;
  Shared& s = shared();
  const RankState& state = *reinterpret_cast<const RankState*>(s.state_memory);
  check_shared();
  if (threadIdx.x == 0) set_up(launch);
  __syncthreads();
  const uint32_t num_workers = s.header.num_workers, num_schedulers = s.header.num_schedulers;
  const uint32_t role = threadIdx.x / 32;
  const Team warp{threadIdx.x % 32, 32};
  const uint32_t block = s.worker_index;
  const bool is_worker = block < num_workers, riding = !s.params.scheduler_threads;
  if (!is_worker || role == SCHEDULER) {
    const uint32_t id = is_worker ? block : role;
    // Where no weights are streamed there is room for the tasks of many schedulers.
    TaskSlot* slots = is_worker ? s.scheduled : reinterpret_cast<TaskSlot*>(s.slots) + 2 * role;
    if (is_worker == riding && id < num_schedulers && !s.dispatcher_schedules) scheduler_loop(state, id, warp, slots);
  } else if (role < NUM_WARPS) {
    consumer_loop(state);
  } else if (role == LOADER) {
    load_loop(state);
  } else if (role == DISPATCHER) {
    if (s.dispatcher_schedules)
      dispatch_and_schedule_loop(state, block, warp);
    else
      dispatch_loop(state, block, warp);
  } else {
    signal_loop(state, block, warp);
  }
  __syncthreads();  // nobody gives up shared memory while another role uses it
}
