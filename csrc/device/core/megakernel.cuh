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
#include "device/core/prepare.cuh"
#include "device/core/worker_index.cuh"

namespace distmk {

enum Role : uint32_t { LOADER = NUM_WARPS, WAITER, CLERK, SCHEDULER, NUM_ROLES };
constexpr uint32_t NUM_THREADS = 32 * NUM_ROLES;
static_assert(MAX_OWN_SCHEDULERS == NUM_ROLES, "one CTA runs them, each in a warp");

// The roles but the consumers' are functions of their own: the consumers then have all registers, and the loader's few
// instructions lie together.
DISTMK_APART void stream_weights(const RankState& state) {
  Shared& s = shared();
  Loader loader(s.ring, s.slots, s.num_slabs[0]);
  const Team lanes{threadIdx.x % 32, 32};
  for (TaskCursor cursor;; cursor.step()) {
    while (!lanes.all(barrier_try_wait(&s.tasks.full[cursor.slot], cursor.parity)))
      if (!lanes.all(!s.ring.leave.get())) return loader.leave();
    const TaskDesc& task = s.tasks.slots[cursor.slot].desc;
    if (attention::is_told_of(task)) {
      const bool goes_on = attention::stream_share(state, lanes, loader, task);
      warp_arrive(&s.tasks.empty[cursor.slot]);
      if (!goes_on) return loader.leave();
      continue;
    }
    const bool streams = streams_weights(task);
    const auto args = *reinterpret_cast<const LinearArgs*>(task.args);
    warp_arrive(&s.tasks.empty[cursor.slot]);
    if (streams && !loader.stream(args, reinterpret_cast<const char*>(state.address(args.weight))))
      return loader.leave();
  }
}

DISTMK_APART void schedule_loop(const RankState& state, uint32_t id, const Team warp, TaskSlot* slots) {
  Scheduler scheduler(state, id, warp, TaskHolder(slots));
  run_scheduler(state, id, warp, scheduler);
}

// `rider`: where it has one, nothing is known ahead, as something may be handed out in between. What is likely is
// announced all the same, and taken back if something else comes.
template <class Rider>
DISTMK_FN void decide_loop(const RankState& state, uint32_t worker, const Team& warp, Rider rider) {
  constexpr bool KNOWS_AHEAD = std::is_same_v<Rider, std::nullptr_t>;
  Shared& s = shared();
  uint32_t n = 0;
  const TaskList list(s.tasks, s.batch, s.num_batches, s.handoff.fired, n);
  Worker decide(state, worker, warp, list, TaskHolder(s.handed_out), rider);
  attention::ShareKeeper share(state, warp);
  uint32_t num_announced = 0;
  const auto announce = [&](const Action& what) {
    share.see(num_announced, what);
    s.handoff.announce(warp, num_announced++, what, route_of(state, what));
  };
  const auto turn_to_next = [&] {
    if (n) barrier_wait(&s.handoff.fired[task_place(n - 1)], task_parity(n - 1));
    ++n;
  };
  for (;;) {
    Action ahead;
    if (KNOWS_AHEAD && num_announced == n && decide.upcoming(&ahead)) announce(ahead);
    if (KNOWS_AHEAD && num_announced == n + 1 && decide.following(&ahead)) announce(ahead);
    if (KNOWS_AHEAD && num_announced == n + 2 && decide.third(&ahead) && ahead.task.desc->far_ahead) announce(ahead);
    const Action action = decide.next();
    if (!KNOWS_AHEAD && num_announced > n && action.kind == ActionKind::RUN) {
      s.handoff.take_back(warp, n);
      turn_to_next();
    }
    const bool leaves = action.kind == ActionKind::LEAVE, was_announced = num_announced > n;
    if (!was_announced) announce(action);
    if (!KNOWS_AHEAD && action.kind == ActionKind::EXPECT) continue;
    if (warp.leader() && leaves) s.handoff.over_at.set(n);
    warp_arrive(&s.handoff.ready[task_place(n)]);
    turn_to_next();
    if (!leaves) continue;
    // To who did not ask, as his inputs had arrived.
    for (; n < num_announced; ++n) warp_arrive(&s.handoff.ready[task_place(n)]);
    if (was_announced) announce(action);
    break;
  }
  if (worker || !warp.leader()) return;
  const uint64_t reason = load_relaxed(state.abort_flag(state.program->rank));
  if (reason) raise_abort(state, static_cast<Abort>(reason));  // the host told this rank alone
  store_relaxed(&reinterpret_cast<LaunchParams*>(state.params->self)->iterations_done, decide.iterations());
}

DISTMK_APART void wait_loop(const RankState& state, uint32_t worker, const Team warp) {
  decide_loop(state, worker, warp, nullptr);
}
// Where a worker's own scheduler has something to hand out: between two warps it would take as long as to this one's
// next look at an event, and longer. What never hands out anything has less code.
DISTMK_APART void wait_and_hand_out(const RankState& state, uint32_t worker, const Team warp) {
  Scheduler rider(state, worker, warp, TaskHolder(shared().scheduled));
  decide_loop(state, worker, warp, &rider);
}

DISTMK_FN bool is_awaited(const RankState& state, const TaskDesc& task) {
  return !streams_weights(task) || linear::is_awaited(state, *reinterpret_cast<const LinearArgs*>(task.args));
}

// Whether what a task's body has seen says as much as its waits: of more than a tile of rows those that it waits for
// have waited before they wrote.
DISTMK_FN bool skips_waits(const Context& context, const TaskDesc& task) {
  if (task.type != static_cast<uint16_t>(TaskType::SUM)) return false;
  const auto& args = *reinterpret_cast<const SumArgs*>(task.args);
  return sum_arrives(context.rank_state, args) && rows_of(context.batch(args.batch)) > TILE_TOKENS;
}

// Whether the clerk may fire task `n`, whose body is done. The waits of those before are met by then, too: their slots
// of the task ring are given back.
DISTMK_FN bool may_fire(const Context& context, Handoff& handoff, uint32_t n) {
  if (skips_waits(context, *handoff.action[task_place(n)].task.desc))
    return context.team.all(!n || handoff.is_ready(n - 1));
  return context.team.all(handoff.is_ready(n) && !handoff.is_over(n));
}

// Fires a task's triggers as soon as its body is done and its waits are met: the consumers go on meanwhile.
DISTMK_APART void keep_list(const RankState& state, uint32_t worker, const Team warp) {
  Shared& s = shared();
  Handoff& handoff = s.handoff;
  TaskFetcher fetcher(state, state.queues[worker], s.tasks);
  Context context(state, warp);
  Tracer tracer(state, worker);
  bool last_was_listed = false;
  uint64_t body_end_ns = 0;
  for (uint32_t n = 0;;) {
    const bool leaving = !warp.all(!s.ring.leave.get());
    if (warp.leader() && handoff.over_at.get() != ~0u) s.ring.hold.set(0);  // for what will never be fired
    const bool done = warp.all(barrier_test(&handoff.done[task_place(n)], task_parity(n)));
    if (done && !body_end_ns) body_end_ns = tracer.now();
    if (done && may_fire(context, handoff, n)) {
      if (!handoff.is_taken_back(n)) {
        const Action& action = handoff.action[task_place(n)];
        context.begin(action.task, action.iteration, action.instance);
        context.set_pushed(handoff.pushed[task_place(n)]);
        if (warp.leader() && is_awaited(state, *action.task.desc)) s.ring.hold.set(1);
        context.finish();
        tracer.keep(context, handoff.ready_ns[task_place(n)], body_end_ns);
        if (last_was_listed) fetcher.give_back();
        last_was_listed = action.kind == ActionKind::RUN;
      }
      warp.sync();
      if (warp.leader()) s.ring.hold.set(0);
      warp_arrive(&handoff.fired[task_place(n)]);
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
  s.block_number = take_block_number(s.params, s.header.num_workers + (s.params.scheduler_threads ? 1 : 0));
  for (uint32_t rank = 0; rank < s.header.num_ranks; ++rank)
    s.heap_bases[rank] = reinterpret_cast<const uint64_t*>(s.params.heap_bases)[rank];
  auto* state = new (s.state_memory)
      RankState(&s.params, reinterpret_cast<uint64_t*>(s.params.faults_seen), &s.header, s.heap_bases);
  if (s.params.num_far) state->far = new (s.far_memory) FarRanks(*state);
  if (s.block_number < s.header.num_workers) {
    if (s.header.gate_event != NO_EVENT) {
      state->near_batch = &s.batch;
      state->num_near_batches = &s.num_batches;
    }
    if (!s.params.scheduler_threads && s.header.num_schedulers == s.header.num_workers &&
        s.header.jit_capacity <= NEAR_RING_ENTRIES)
      state->near_ring = &s.near_ring.ring;
  }
  s.waiter_hands_out = state->near_ring && has_launches(*state, s.block_number);
  s.near_ring.ring = {};
  s.ring.init();
  s.tasks.init();
  s.handoff.init();
  s.sums.init();
  for (Places& places : s.places) places = {};
  for (Flag& number : s.num_slabs) number = {0};
  for (uint32_t& number : s.task_numbers) number = 0;
  s.attention_share.init();
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
  const uint32_t block = s.block_number;
  const bool is_worker = block < num_workers, riding = !s.params.scheduler_threads;
  if (!is_worker || role == SCHEDULER) {
    const uint32_t id = is_worker ? block : role;
    // Where no weights are streamed there is room for the tasks of many schedulers.
    TaskSlot* slots = is_worker ? s.scheduled : reinterpret_cast<TaskSlot*>(s.slots) + 2 * role;
    if (is_worker == riding && id < num_schedulers && !s.waiter_hands_out) schedule_loop(state, id, warp, slots);
  } else if (role < NUM_WARPS) {
    consume_loop(state);
  } else if (role == LOADER) {
    stream_weights(state);
  } else if (role == WAITER) {
    if (s.waiter_hands_out)
      wait_and_hand_out(state, block, warp);
    else
      wait_loop(state, block, warp);
  } else {
    keep_list(state, block, warp);
  }
  __syncthreads();  // nobody gives up shared memory while another role uses it
}
