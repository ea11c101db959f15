// Copies of tasks in shared memory, so that what a worker looks at next costs it no trip to memory: a warp fetches its
// list ahead, task after task, over and over.
#pragma once
#include "device/core/pipeline.cuh"
#include "runtime/wait.h"

namespace distmk {

constexpr uint32_t SLOT_WAITS = 8, SLOT_TRIGGERS = 8;  // those of a task that has more stay where they are
constexpr uint32_t NUM_TASK_SLOTS = 6;                 // fetched ahead

// Tasks that a worker is at take turns in what its warps tell each other of them: of the n-th since the launch began.
constexpr uint32_t NUM_HANDSHAKE_SLOTS = 4;
DISTMK_FN uint32_t handshake_slot(uint32_t n) { return n % NUM_HANDSHAKE_SLOTS; }
DISTMK_FN uint32_t handshake_phase(uint32_t n) { return n / NUM_HANDSHAKE_SLOTS % 2; }

struct alignas(16) TaskSlot {
  TaskDesc desc;
  Wait waits[SLOT_WAITS];
  Trigger triggers[SLOT_TRIGGERS];
  uint32_t index;

  DISTMK_FN TaskView view(const RankState& state) const {
    return {&desc, desc.num_waits <= SLOT_WAITS ? waits : state.waits + desc.wait_begin,
            desc.num_triggers <= SLOT_TRIGGERS ? triggers : state.triggers + desc.trigger_begin, index};
  }
};

template <class T>
DISTMK_FN void copy_words(const Team& team, T* dst, const T* src, uint32_t count) {
  const auto* from = reinterpret_cast<const uint4*>(src);
  for (uint32_t i = team.index; i < count * sizeof(T) / sizeof(uint4); i += team.size)
    reinterpret_cast<uint4*>(dst)[i] = from[i];
}

DISTMK_FN void load_task(const RankState& state, uint32_t index, const Team& team, TaskSlot& slot) {
  static_assert(sizeof(TaskDesc) % 16 == 0 && sizeof(Wait) == 16 && sizeof(Trigger) == 16, "");
  copy_words(team, &slot.desc, &state.tasks[index], 1);
  team.sync();
  const TaskDesc& desc = slot.desc;
  const Wait* waits = state.waits + desc.wait_begin;
  const Trigger* triggers = state.triggers + desc.trigger_begin;
  if (desc.num_waits <= SLOT_WAITS) copy_words(team, slot.waits, waits, desc.num_waits);
  if (desc.num_triggers <= SLOT_TRIGGERS) copy_words(team, slot.triggers, triggers, desc.num_triggers);
  if (team.leader()) slot.index = index;
  team.sync();
}

// A worker's list as it is fetched: slot n % NUM_TASK_SLOTS holds the n-th task since the launch began.
struct TaskPipeline {
  uint64_t full[NUM_TASK_SLOTS], empty[NUM_TASK_SLOTS];
  TaskSlot slots[NUM_TASK_SLOTS];

  DISTMK_FN void init() {
    for (uint32_t s = 0; s < NUM_TASK_SLOTS; ++s) {
      barrier_init(&full[s], WARP_ARRIVALS);
      barrier_init(&empty[s], WARP_ARRIVALS);  // by the loader; that the task was run its fetcher knows itself
    }
  }
};

using TaskCursor = PipelineState<NUM_TASK_SLOTS>;  // of a reader or of the fetcher

// Fills the ring, over and over.
class TaskPrefetcher {
 public:
  DISTMK_FN TaskPrefetcher(const RankState& state, const Queue& queue, TaskPipeline& ring)
      : state_(state), queue_(queue), ring_(ring) {}

  // A task has been run.
  DISTMK_FN void give_back() { ++num_free_; }
  DISTMK_FN bool has_room() const { return queue_.count && num_free_; }

  // Fetches one more task where there is room. False: the loader still reads what lies there.
  DISTMK_FN bool fetch(const Team& team) {
    if (!team.all(barrier_test(&ring_.empty[cursor_.index], cursor_.phase ^ 1))) return false;
    load_task(state_, queue_.begin + next_, team, ring_.slots[cursor_.index]);
    warp_arrive(&ring_.full[cursor_.index]);
    if (++next_ == queue_.count) next_ = 0;
    cursor_.advance();
    --num_free_;
    return true;
  }

 private:
  const RankState& state_;
  const Queue queue_;
  TaskPipeline& ring_;
  TaskCursor cursor_;
  uint32_t next_ = 0, num_free_ = NUM_TASK_SLOTS;
};

// The worker's own reading of the ring.
class TaskList {
 public:
  // `fired`: a barrier for each task in turn; `num_handed`: tasks that were handed to the consumers so far.
  DISTMK_FN TaskList(TaskPipeline& ring, Batch& batch, uint64_t& num_batches, uint64_t* signaled,
                     const uint32_t& num_handed)
      : ring_(ring), batch_(batch), num_batches_(num_batches), fired_(signaled), num_handed_(num_handed) {}

  // The row table of an iteration comes at hand once it is there. Whoever reads the last one is done: a batch is
  // written only then.
  DISTMK_FN void poll_batch(const RankState& state, uint64_t iteration, const Team& team) {
    const ProgramHeader& program = *state.program;
    if (program.iteration_event == NO_EVENT || num_batches_ >> 1 > iteration) return;
    if (!batch_arrived(state, iteration, team)) return;
    // That it lamport_value says so already, by way of the other ranks; this is for whoever looks at this block alone.
    if (const uint32_t last = num_handed_ - 1; num_handed_)
      barrier_wait(&fired_[handshake_slot(last)], handshake_phase(last));
    const auto* from = reinterpret_cast<const uint4*>(state.address(program.iteration_batch));
    for (uint32_t i = team.index; i < sizeof(Batch) / sizeof(uint4); i += team.size)
      reinterpret_cast<uint4*>(&batch_)[i] = __ldcg(from + i);
    team.sync();
    if (team.leader()) store_release(&num_batches_, (iteration + 1) << 1 | (batch_.stop != 0), Scope::BLOCK);
    team.sync();
  }

  DISTMK_FN TaskView next(const RankState& state, uint32_t) {
    barrier_wait(&ring_.full[cursor_.index], cursor_.phase);
    const TaskView view = ring_.slots[cursor_.index].view(state);
    cursor_.advance();
    return view;
  }

 private:
  TaskPipeline& ring_;
  Batch& batch_;
  uint64_t& num_batches_;
  uint64_t* const fired_;
  const uint32_t& num_handed_;
  TaskCursor cursor_;
};

// Tasks that were handed out, fetched when they are: one may still be running while the next is taken.
class TaskHolder {
 public:
  DISTMK_FN explicit TaskHolder(TaskSlot* two_slots) : slots_(two_slots) {}

  // `also`: a holder at hand that may hold it, too, so that nothing need be fetched.
  DISTMK_FN TaskView take(const RankState& state, uint32_t index, const Team& team, const TaskHolder* also = nullptr) {
    TaskSlot& slot = slots_[turn_ ^= 1];
    team.sync();
    if (also && also->slots_[also->turn_].index == index) {
      copy_words(team, &slot, &also->slots_[also->turn_], 1);
      team.sync();
    } else {
      load_task(state, index, team, slot);
    }
    return slot.view(state);
  }

 private:
  TaskSlot* slots_;
  uint32_t turn_ = 0;
};

}  // namespace distmk
