// The interface of a task body: its rank's memory by operand, its peers' memory by put and push.
#pragma once
#include "platform/start_signal.h"
#include "runtime/rank_state.h"

namespace distmk {

// What a body is given: the rank, the task and the iteration. Every thread of the team has a Context of its own, and
// all threads call put, push and finish together.
class Context {
 public:
  const RankState& rank_state;
  const Team team;
  TaskView task;
  uint64_t iteration = 0;
  uint32_t instance = 0;  // of a massive launch or a spread task
  bool resumed = false;   // the task was postponed in this iteration

  DISTMK_FN Context(const RankState& state, const Team& threads) : rank_state(state), team(threads) {}

  // Starts the next task.
  DISTMK_FN void begin(const TaskView& next_task, uint64_t next_iteration, uint32_t next_instance = 0,
                       const StartSignal& start = {}) {
    task = next_task;
    iteration = next_iteration;
    instance = next_instance;
    start_ = start;
    ready_ = polled_ = false;
    num_assigned_ = 0;
    pushed_ = 0;
    finished_ = false;
  }

  // Waits until the task's waits are met: everything that other tasks write for it can then be read. Returns false if
  // the launch is over or the task was revoked; the body then returns. Before this call a body may do only what depends
  // on no other task of the iteration.
  DISTMK_FN bool inputs_ready() {
    if (ready_) return true;
    ready_ = polled_ ? start_.confirm() : start_.wait();
    if (!start_.records_time() && params().trace_capacity) ready_ns_ = now_ns();
    return ready_;
  }

  // Takes over what inputs_ready() has returned in another context of this task.
  DISTMK_FN void set_ready(bool ready) { ready_ = ready; }

  // First call of a body with a prologue (Task.has_prologue). Afterwards the body may read the batch and everything
  // written before the batch. It may also use the shared memory of bodies. All warps have left the worker's previous
  // task, whose copies have landed by then, and the loader fills the stages for a product in jobs only once the
  // consumers have entered it. Returns false if the launch is over; the body then returns. If inputs_ready() is false
  // later, the body first waits for its own copies into shared memory.
  DISTMK_FN bool begin_prologue() {
    start_.wait_previous();
    return has_batch() || inputs_ready();
  }

  // For a body that polls its inputs in Lamport buffers and writes as soon as they have arrived. The checker proves
  // that no task still reads the memory that it overwrites.

  // Waits for the end of the worker's previous task, so that everything this worker leaves for the task is there.
  DISTMK_FN void begin_polling() const { start_.wait_previous(); }
  // True once the task's waits are met or the launch is over.
  DISTMK_FN bool stop_polling() const { return ready_ || start_.is_ready(); }
  // Says that the inputs have arrived. The waits are then needed only at the task's end, or not at all if the inputs
  // imply them.
  DISTMK_FN void inputs_polled() {
    if (!ready_ && !polled_) start_.record_time();
    polled_ = true;
  }
  // Calls `load`, which returns whether all its elements have arrived. Without `polls` it is called once, else until it
  // returns true or the task's waits are met. The waits end the polling of a zero whose writer does not store it as -0.
  template <class Load>
  DISTMK_FN void poll(bool polls, const Load& load) const {
    for (bool last = !polls;;) {
      if (!last) last = stop_polling();
      if (load() || last) return;
    }
  }
  DISTMK_FN uint64_t ready_ns() const { return ready_ns_; }

  // The instances of a spread task that this worker runs are `instance`, `instance` + num_workers, ... below `count`. A
  // task that is not spread has one assignment: the whole task.

  // Returns whether there is an instance to run. A body that has fewer instances in this iteration than max_instances
  // calls it again with their number.
  DISTMK_FN bool take_assigned(uint32_t count) {
    if (!is_spread(*task.desc)) return true;
    num_assigned_ = count;
    return instance < count;
  }
  // Advances `index` to the next instance and returns whether that exists.
  DISTMK_FN bool next_assigned(uint32_t& index) const {
    index += rank_state.program->num_workers;
    return index < num_assigned_;
  }

  DISTMK_FN uint32_t rank() const { return rank_state.program->rank; }
  DISTMK_FN uint32_t num_ranks() const { return rank_state.program->num_ranks; }
  DISTMK_FN const LaunchParams& params() const { return *rank_state.params; }

  template <class T>
  DISTMK_FN T* at(uint64_t operand) const {
    return reinterpret_cast<T*>(rank_state.address(operand));
  }

  DISTMK_FN const Batch* batch(uint64_t operand) const { return rank_state.batch(operand); }

  // Peer-mapped pointer to a heap operand on another rank; null if only the transport reaches that rank.
  template <class T>
  DISTMK_FN T* peer(uint32_t rank, uint64_t operand) const {
    if (rank_state.transport && is_remote(*rank_state.transport, rank)) return nullptr;
    return reinterpret_cast<T*>(rank_state.heap_bases[rank] + (operand & ((1ull << SPACE_SHIFT) - 1)));
  }

  // Copies to the same heap offset on another rank. The data arrives there before the signals of a later push() to that
  // rank.
  DISTMK_FN void put(uint32_t rank, uint64_t dst, const void* src, uint64_t num_bytes) const {
    if (void* mapped = peer<void>(rank, dst)) return copy_bytes(team, mapped, src, num_bytes);
    transport_put(*rank_state.transport, team, rank, dst & ((1ull << SPACE_SHIFT) - 1), src, num_bytes);
  }

  // put() for data that no signal follows.
  DISTMK_FN void put_now(uint32_t rank, uint64_t dst, const void* src, uint64_t num_bytes) const {
    put(rank, dst, src, num_bytes);
    if (!peer<void>(rank, dst) && team.leader()) transport_send(*rank_state.transport, rank);
  }

  // putmem_signal: put(), then this task's triggers on that rank.
  DISTMK_FN void push(uint32_t rank, uint64_t dst, const void* src, uint64_t num_bytes) {
    put(rank, dst, src, num_bytes);
    signal_rank(rank);
  }

  // Signals this task's triggers on a rank that already has all its data.
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

  // Pushes the block at `operand` of this rank to all ranks that are not peer-mapped; the others already have it.
  DISTMK_FN void push_remote(uint64_t operand, uint64_t num_bytes) {
    if (!rank_state.transport) return;
    team.sync();
    for (uint32_t other = 0; other < num_ranks(); ++other)
      if (!peer<void>(other, operand)) push(other, operand, at<void>(operand), num_bytes);
  }

  // Bit mask of the ranks whose triggers have been signaled with their data. Threads that finish a task whose body
  // other threads ran get it by set_pushed().
  DISTMK_FN uint64_t pushed() const { return pushed_; }
  DISTMK_FN void set_pushed(uint64_t ranks) { pushed_ = ranks; }

  // For a task that a scheduler runs: the task is not done, and its body is called again with `resumed` set.
  DISTMK_FN void postpone() { postponed_ = true; }
  DISTMK_FN bool postponed() const { return postponed_; }

  // Signals the remaining triggers, once the whole team has ended the body. A body may call it earlier if no other task
  // sees what it does afterwards.
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

  // Signals for the instances of a massive launch that this iteration does not need, so that every iteration adds the
  // same count.
  DISTMK_FN void finish_unused(uint32_t num_instances) {
    if (!team.leader()) return;
    for (uint32_t t = 0; t < task.desc->num_triggers && num_instances; ++t) signal(task.triggers[t], num_instances);
    if (rank_state.transport) transport_send_all(*rank_state.transport);
  }

 private:
  StartSignal start_;
  bool ready_ = false, polled_ = false;
  uint64_t ready_ns_ = 0;  // only if the launch is traced
  uint32_t num_assigned_ = 0;
  uint64_t pushed_ = 0;
  bool finished_ = false, postponed_ = false;

  // Whether the cached batch is already this iteration's, before the waits are met. It then stays until the task is
  // signaled. This holds for every task that the dispatcher issues ahead, because it does so only in iterations that
  // have begun. A program without an iteration barrier caches no batch, because one of its tasks may write it.
  DISTMK_FN bool has_batch() const {
    return rank_state.num_cached_batches && load_relaxed(rank_state.num_cached_batches) >> 1 == iteration + 1;
  }

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

}  // namespace distmk
