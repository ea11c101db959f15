// What a task body may touch: its rank's memory by operand, its peers' by put and push.
#pragma once
#include <type_traits>

#include "abi.h"
#include "platform/platform.h"
#include "platform/start_signal.h"

namespace distmk {

// The way to ranks that cannot be reached by pointer. Data put to such a rank arrives before what is signalled with it;
// one send may overtake another, so a task is done only after a quiet. The host twin has far ranks where a fault asks
// for them (csrc/host/delayed_puts.cpp).
class Transport;
DISTMK_BODY bool is_remote(const Transport& transport, uint32_t rank);
DISTMK_BODY void transport_put(Transport& transport, const Team& team, uint32_t rank, uint64_t heap_offset,
                               const void* src, uint64_t num_bytes);
DISTMK_BODY void transport_signal(Transport& transport, uint32_t rank, uint32_t event, uint64_t amount);
DISTMK_BODY void transport_send(Transport& transport, uint32_t rank);
DISTMK_BODY void transport_send_all(Transport& transport);
DISTMK_BODY void transport_quiet(Transport& transport);
DISTMK_BODY void transport_abort(Transport& transport, uint32_t rank,
                                 uint64_t reason);  // sets its abort flag, some time

DISTMK_FN Scope scope_of(bool system) { return system ? Scope::SYSTEM : Scope::DEVICE; }

// In the lists of workers, not handed out.
DISTMK_FN bool is_listed(const TaskDesc& task) {
  return task.launch == static_cast<uint16_t>(LaunchKind::AHEAD) ||
         task.launch == static_cast<uint16_t>(LaunchKind::SPREAD);
}
DISTMK_FN bool is_spread(const TaskDesc& task) { return task.launch == static_cast<uint16_t>(LaunchKind::SPREAD); }

// A task with its waits and triggers, in the program or in a copy at hand.
struct TaskView {
  const TaskDesc* desc = nullptr;
  const Wait* waits = nullptr;
  const Trigger* triggers = nullptr;
  uint32_t index = 0;
};

// One rank's view of a launch, shared by its workers and schedulers.
struct RankState {
  const LaunchParams* params;
  const ProgramHeader* program;
  const TaskDesc* tasks;
  const Wait* waits;
  const Trigger* triggers;
  const Queue* queues;
  const uint32_t* launches;
  uint64_t* heap_bases;                 // where each rank's heap is mapped here
  uint64_t to_address[3];               // added to an operand of each Space; of none, 0, that is null
  uint64_t* faults_seen;                // triggers that matched the injected fault so far
  Transport* transport = nullptr;       // null: every rank is reached by pointer
  const Batch* cached_batch = nullptr;  // a copy at hand of the row table; null: it is read where it lies
  const uint64_t* num_cached_batches =
      nullptr;                    // iterations whose row table was copied, twice; odd: the last says stop
  JitRing* local_ring = nullptr;  // this worker's ring, where its scheduler rides along and it lies at hand

  DISTMK_FN RankState(const LaunchParams* launch, uint64_t* fault_counter)
      : RankState(launch, fault_counter, reinterpret_cast<const ProgramHeader*>(launch->program),
                  reinterpret_cast<uint64_t*>(launch->heap_bases)) {}

  // `header` and `bases`: copies at hand of the program's header and of the table of heaps.
  DISTMK_FN RankState(const LaunchParams* launch, uint64_t* fault_counter, const ProgramHeader* header, uint64_t* bases)
      : params(launch), program(header), heap_bases(bases), faults_seen(fault_counter) {
    const auto base = params->program;
    tasks = reinterpret_cast<const TaskDesc*>(base + program->tasks_offset);
    waits = reinterpret_cast<const Wait*>(base + program->waits_offset);
    triggers = reinterpret_cast<const Trigger*>(base + program->triggers_offset);
    queues = reinterpret_cast<const Queue*>(base + program->queues_offset);
    launches = reinterpret_cast<const uint32_t*>(base + program->launches_offset);
    const auto map = [&](Space space, uint64_t base) {
      to_address[static_cast<uint64_t>(space)] = base - (static_cast<uint64_t>(space) << SPACE_SHIFT);
    };
    map(Space::NONE, 0);
    map(Space::HEAP, heap());
    map(Space::LOCAL, params->local_base);
  }

  DISTMK_FN uint64_t heap() const { return heap_bases[program->rank]; }

  DISTMK_FN TaskView view(uint32_t index) const {
    const TaskDesc& desc = tasks[index];
    return {&desc, waits + desc.wait_begin, triggers + desc.trigger_begin, index};
  }

  DISTMK_FN uint64_t* event(uint32_t rank, uint32_t index) const {
    return reinterpret_cast<uint64_t*>(heap_bases[rank] + program->events_heap_offset + index * EVENT_STRIDE_BYTES);
  }
  DISTMK_FN uint64_t* abort_flag(uint32_t rank) const { return &reinterpret_cast<Control*>(heap_bases[rank])->abort; }
  DISTMK_FN JitRing* ring(uint32_t worker) const {
    const uint64_t ring_bytes = sizeof(JitRing) + uint64_t{program->jit_capacity} * sizeof(JitEntry);
    return reinterpret_cast<JitRing*>(heap() + program->rings_heap_offset + worker * ring_bytes);
  }
  DISTMK_FN uint64_t address(uint64_t operand) const { return operand + to_address[operand >> SPACE_SHIFT]; }
  // The row table, or null where a task follows none.
  DISTMK_FN const Batch* batch(uint64_t operand) const {
    return operand && cached_batch ? cached_batch : reinterpret_cast<const Batch*>(address(operand));
  }
};

// What a body is given: the rank, the task being run and the iteration it is run for. Every thread of the team has its
// own, and calls put and push together with the others.
class Context {
 public:
  const RankState& rank_state;
  const Team team;
  TaskView task;
  uint64_t iteration = 0;
  uint32_t instance = 0;  // of a massive launch or a spread task

  DISTMK_FN Context(const RankState& state, const Team& threads) : rank_state(state), team(threads) {}

  // What is run next.
  DISTMK_FN void begin(const TaskView& view, uint64_t for_iteration, uint32_t which_instance = 0,
                       const StartSignal& start = {}) {
    task = view;
    iteration = for_iteration;
    instance = which_instance;
    start_ = start;
    ready_ = found_ = false;
    num_assigned_ = 0;
    pushed_ = 0;
    finished_ = false;
  }

  // Waits until what other tasks write for this one is there. False: the launch is over, nothing is left to be done. A
  // body may be entered before; what depends on no other task of the iteration it can do before it asks.
  DISTMK_FN bool inputs_ready() {
    if (ready_) return true;
    ready_ = found_ ? start_.confirm() : start_.wait();
    if (!start_.records_time() && params().trace_capacity) ready_ns_ = now_ns();
    return ready_;
  }
  // Of a body that looks by itself whether its inputs are there, and may write as soon as they are: what it overwrites
  // is over by then, which the checker sees to. It begins to look; all that this worker has left for it is there then.
  // Whether the task's waits are met, or the launch is over. It has found what it looked for. Only at its end are its
  // waits waited for, or not even then, if what it has found says as much.
  DISTMK_FN void begin_polling() const { start_.wait_previous(); }
  DISTMK_FN bool stop_polling() const { return ready_ || start_.given(); }
  DISTMK_FN void inputs_polled() {
    if (!ready_ && !found_) start_.record_time();
    found_ = true;
  }
  // Looks for them by `load`, which says whether they are all there: once if they are not `arriving`, else until they
  // are, or until the task's waits are met: a zero may have been left by somebody who cannot write the negative one.
  template <class Load>
  DISTMK_FN void poll(bool polls, const Load& load) const {
    for (bool last = !polls;;) {
      if (!last) last = stop_polling();
      if (load() || last) return;
    }
  }
  DISTMK_FN uint64_t ready_ns() const { return ready_ns_; }

  // Takes a worker's share of the `count` instances of a spread task, from `instance` on. False: none is left for it.
  // A body whose task has fewer this time than it may have asks once more. What is not spread is all the worker's.
  DISTMK_FN bool take_assigned(uint32_t count) {
    if (!is_spread(*task.desc)) return true;
    num_assigned_ = count;
    return instance < count;
  }
  // Turns to the next instance of the share. False: there is none, as in a task that is not spread.
  DISTMK_FN bool next_assigned(uint32_t& which) const {
    which += rank_state.program->num_workers;
    return which < num_assigned_;
  }

  DISTMK_FN uint32_t rank() const { return rank_state.program->rank; }
  DISTMK_FN uint32_t num_ranks() const { return rank_state.program->num_ranks; }
  DISTMK_FN const LaunchParams& params() const { return *rank_state.params; }

  template <class T>
  DISTMK_FN T* at(uint64_t operand) const {
    return reinterpret_cast<T*>(rank_state.address(operand));
  }

  DISTMK_FN const Batch* batch(uint64_t operand) const { return rank_state.batch(operand); }

  // A heap operand on another rank, or null where it is out of reach of a pointer.
  template <class T>
  DISTMK_FN T* peer(uint32_t rank, uint64_t operand) const {
    if (rank_state.transport && is_remote(*rank_state.transport, rank)) return nullptr;
    return reinterpret_cast<T*>(rank_state.heap_bases[rank] + (operand & ((1ull << SPACE_SHIFT) - 1)));
  }

  // Copy to the same heap offset on another rank; what follows with push() to that rank arrives after it.
  DISTMK_FN void put(uint32_t rank, uint64_t dst, const void* src, uint64_t num_bytes) const {
    if (void* near = peer<void>(rank, dst)) return copy_bytes(team, near, src, num_bytes);
    transport_put(*rank_state.transport, team, rank, dst & ((1ull << SPACE_SHIFT) - 1), src, num_bytes);
  }

  // putmem_signal: copy, then fire this task's triggers on that rank.
  DISTMK_FN void push(uint32_t rank, uint64_t dst, const void* src, uint64_t num_bytes) {
    put(rank, dst, src, num_bytes);
    signal_rank(rank);
  }

  // Fires this task's triggers on a rank that has its data.
  DISTMK_FN void signal_rank(uint32_t rank) {
    team.sync();
    if (rank_state.transport) {
      if (team.leader()) {
        for (uint32_t t = 0; t < task.desc->num_triggers; ++t) signal_trigger(t, rank);
        transport_send(*rank_state.transport, rank);
      }
    } else {
      for (uint32_t t = team.index; t < task.desc->num_triggers; t += team.size) signal_trigger(t, rank);
    }
    pushed_ |= 1ull << rank;
  }

  // push() of a block that lies at `operand` here to the ranks that no pointer reaches; the others have it already.
  DISTMK_FN void push_remote(uint64_t operand, uint64_t num_bytes) {
    if (!rank_state.transport) return;
    team.sync();
    for (uint32_t other = 0; other < num_ranks(); ++other)
      if (!peer<void>(other, operand)) push(other, operand, at<void>(operand), num_bytes);
  }

  // Ranks whose triggers need no firing any more. Who finishes a task for those who ran its body is told of them.
  DISTMK_FN uint64_t pushed() const { return pushed_; }
  DISTMK_FN void set_pushed(uint64_t ranks) { pushed_ = ranks; }

  // The rest of the triggers, once the whole team is done with the body. A body may call it itself when all that is
  // left to do is seen by no task.
  DISTMK_FN void finish() {
    if (finished_) return;
    finished_ = true;
    team.sync();
    if (!rank_state.transport) {
      for (uint32_t t = team.index; t < task.desc->num_triggers; t += team.size) signal_unless_pushed(t);
    } else if (team.leader()) {
      transport_quiet(*rank_state.transport);
      for (uint32_t t = 0; t < task.desc->num_triggers; ++t) signal_unless_pushed(t);
      transport_send_all(*rank_state.transport);
    }
  }

  // Stand in for instances of a massive launch that were not needed, so that every iteration counts the same.
  DISTMK_FN void finish_unused(uint32_t num_instances) {
    if (!team.leader()) return;
    for (uint32_t t = 0; t < task.desc->num_triggers && num_instances; ++t) signal(task.triggers[t], num_instances);
    if (rank_state.transport) transport_send_all(*rank_state.transport);
  }

 private:
  StartSignal start_;
  bool ready_ = false, found_ = false;
  uint64_t ready_ns_ = 0;      // where the launch is traced
  uint32_t num_assigned_ = 0;  // instances of a spread task
  uint64_t pushed_ = 0;        // ranks whose triggers went out with their data
  bool finished_ = false;

  DISTMK_FN void signal_trigger(uint32_t t, uint32_t rank) {
    if (task.triggers[t].rank == rank) signal(task.triggers[t], 1);
  }
  DISTMK_FN void signal_unless_pushed(uint32_t t) {
    if (!(pushed_ >> task.triggers[t].rank & 1)) signal(task.triggers[t], 1);
  }

  DISTMK_FN void signal(const Trigger& trigger, uint64_t times) const {
    const Fault& fault = rank_state.params->fault;
    if (fault.drop_nth && trigger.event == fault.drop_event && trigger.rank == fault.drop_rank) {
      const uint64_t seen = count_up(rank_state.faults_seen);
      if (seen == fault.drop_nth) return;
    }
    if (rank_state.transport && is_remote(*rank_state.transport, trigger.rank))
      return transport_signal(*rank_state.transport, trigger.rank, trigger.event, trigger.amount * times);
    add_release(rank_state.event(trigger.rank, trigger.event), trigger.amount * times, scope_of(trigger.system));
  }
};

// Bodies, one a task type: csrc/host/bodies or csrc/device/bodies.
#define DISTMK_DECLARE_BODY(id, name, Args) DISTMK_BODY void body_##name(Context& context, const Args& args);
DISTMK_TASK_TYPES(DISTMK_DECLARE_BODY)
#undef DISTMK_DECLARE_BODY

// All but `prepare`, which only a scheduler runs and calls by its name.
template <uint32_t TYPE>
DISTMK_FN void run_body_of(Context& context) {
#define DISTMK_IF(id, name, Args)                                       \
  if constexpr (id == TYPE && !std::is_same_v<Args, SchedulerStepArgs>) \
    body_##name(context, *reinterpret_cast<const Args*>(context.task.desc->args));
  DISTMK_TASK_TYPES(DISTMK_IF)
#undef DISTMK_IF
}
DISTMK_FN void run_body(Context& context) {
  switch (context.task.desc->type) {
#define DISTMK_CASE(id, name, Args) \
  case id:                          \
    return run_body_of<id>(context);
    DISTMK_TASK_TYPES(DISTMK_CASE)
#undef DISTMK_CASE
  }
}

}  // namespace distmk
