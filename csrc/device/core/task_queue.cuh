// Copies of task descriptors in shared memory, so that no role waits for global memory to learn its next task. The
// signaler prefetches its worker's list, iteration after iteration; the dispatcher and the loader read it.
#pragma once
#include "device/core/handshake.cuh"
#include "device/core/pipeline.cuh"
#include "runtime/wait.h"

namespace distmk {

constexpr uint32_t SLOT_WAITS = 8, SLOT_TRIGGERS = 8;  // a task with more has them read from the program
constexpr uint32_t NUM_TASK_SLOTS = 6;                 // number of prefetched tasks

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

// The prefetched part of a worker's list. Slot n % NUM_TASK_SLOTS holds the n-th task since the launch began.
struct TaskPipeline {
  uint64_t full[NUM_TASK_SLOTS], empty[NUM_TASK_SLOTS];
  TaskSlot slots[NUM_TASK_SLOTS];

  DISTMK_FN void init() {
    for (uint32_t s = 0; s < NUM_TASK_SLOTS; ++s) {
      barrier_init(&full[s], WARP_ARRIVALS);
      barrier_init(&empty[s], WARP_ARRIVALS);  // the loader releases it; the signaler itself counts finished tasks
    }
  }
};

using TaskCursor = PipelineState<NUM_TASK_SLOTS>;

// The producer of the TaskPipeline, in the signaler warp.
class TaskPrefetcher {
 public:
  DISTMK_FN TaskPrefetcher(const RankState& state, const Queue& queue, TaskPipeline& tasks)
      : state_(state), queue_(queue), tasks_(tasks) {}

  // The oldest task has run. Nobody but perhaps the loader still reads its slot.
  DISTMK_FN void release_slot() { ++num_free_; }
  DISTMK_FN bool has_room() const { return queue_.count && num_free_; }

  // Fetches the next task of the list; call only if has_room(). False: the loader still reads the slot.
  DISTMK_FN bool fetch(const Team& team) {
    if (!team.all(barrier_test(&tasks_.empty[cursor_.index], cursor_.phase ^ 1))) return false;
    load_task(state_, queue_.begin + next_, team, tasks_.slots[cursor_.index]);
    warp_arrive(&tasks_.full[cursor_.index]);
    if (++next_ == queue_.count) next_ = 0;
    cursor_.advance();
    --num_free_;
    return true;
  }

 private:
  const RankState& state_;
  const Queue queue_;
  TaskPipeline& tasks_;
  TaskCursor cursor_;
  uint32_t next_ = 0, num_free_ = NUM_TASK_SLOTS;
};

// The source of tasks for runtime/worker.h and runtime/scheduler.h. The host's is in runtime/task_source.h.
struct CachedTasks {
  // A worker's list, read from the TaskPipeline.
  class List {
   public:
    // `signaled`: the handshake's barriers. `num_started`: number of tasks made ready so far.
    DISTMK_FN List(TaskPipeline& tasks, Batch& batch, uint64_t& num_batches, uint64_t* signaled,
                   const uint32_t& num_started)
        : tasks_(tasks), batch_(batch), num_batches_(num_batches), signaled_(signaled), num_started_(num_started) {}

    // Copies an iteration's batch metadata to shared memory once it has arrived. All readers of the previous batch have
    // finished by then, because the scheduler step writes a batch only after each of them has signaled.
    DISTMK_FN void poll_batch(const RankState& state, uint64_t iteration, const Team& team) {
      const ProgramHeader& program = *state.program;
      if (program.iteration_event == NO_EVENT || num_batches_ >> 1 > iteration) return;
      if (!batch_arrived(state, iteration, team)) return;
      // The batch's arrival implies that the worker's last task is signaled, but by way of other ranks. This wait shows
      // it to tools that analyze one block alone.
      if (const uint32_t last = num_started_ - 1; num_started_)
        barrier_wait(&signaled_[handshake_slot(last)], handshake_phase(last));
      const auto* from = reinterpret_cast<const uint4*>(state.address(program.iteration_batch));
      for (uint32_t i = team.index; i < sizeof(Batch) / sizeof(uint4); i += team.size)
        reinterpret_cast<uint4*>(&batch_)[i] = __ldcg(from + i);
      team.sync();
      if (team.leader()) store_release(&num_batches_, (iteration + 1) << 1 | (batch_.stop != 0), Scope::BLOCK);
      team.sync();
    }

    DISTMK_FN TaskView next(const RankState& state, uint32_t) {
      barrier_wait(&tasks_.full[cursor_.index], cursor_.phase);
      const TaskView view = tasks_.slots[cursor_.index].view(state);
      cursor_.advance();
      return view;
    }

   private:
    TaskPipeline& tasks_;
    Batch& batch_;
    uint64_t& num_batches_;
    uint64_t* const signaled_;
    const uint32_t& num_started_;
    TaskCursor cursor_;
  };

  // Holds dispatched tasks, which are fetched when they are taken. It has two slots, because the previous task may
  // still be running.
  class Holder {
   public:
    DISTMK_FN explicit Holder(TaskSlot* two_slots) : slots_(two_slots) {}

    // `other`: a holder that may already have the task, which then is copied from there.
    DISTMK_FN TaskView take(const RankState& state, uint32_t index, const Team& team, const Holder* other = nullptr) {
      TaskSlot& slot = slots_[last_ ^= 1];
      team.sync();
      if (other && other->slots_[other->last_].index == index) {
        copy_words(team, &slot, &other->slots_[other->last_], 1);
        team.sync();
      } else {
        load_task(state, index, team, slot);
      }
      return slot.view(state);
    }

   private:
    TaskSlot* slots_;
    uint32_t last_ = 0;
  };
};

}  // namespace distmk
