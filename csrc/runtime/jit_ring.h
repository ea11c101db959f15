// A worker's just-in-time ring: a single-producer single-consumer queue of tasks that are dispatched at run time. The
// worker's scheduler pushes, the worker pops. The ring is in the heap, or in shared memory if both run in one CTA.
#pragma once
#include "runtime/rank_state.h"

namespace distmk {

constexpr uint64_t CLOSED_FOREVER = ~0ull;  // an iteration that never comes: the ring is closed for the whole launch

struct JitRingView {
  JitRing* ring;
  uint32_t capacity;  // a power of two
  Scope scope;

  DISTMK_FN JitEntry& entry(uint64_t n) const { return reinterpret_cast<JitEntry*>(ring + 1)[n & (capacity - 1)]; }

  // Returns false if the ring is full.
  DISTMK_FN bool push(const Team& team, const JitEntry& new_entry) const {
    const uint64_t tail = load_relaxed(&ring->tail);
    if (!team.all(tail - load_acquire(&ring->head, scope) < capacity)) return false;
    if (team.leader()) {
      entry(tail) = new_entry;
      store_release(&ring->tail, tail + 1, scope);
    }
    team.sync();
    return true;
  }

  // `head` is the worker's own count of popped entries; the copy in the ring tells the scheduler how much room there
  // is. Returns false if the ring is empty.
  DISTMK_FN bool pop(const Team& team, uint64_t* head, JitEntry* popped) const {
    // Every thread acquires for itself, as every thread reads the entry.
    if (!team.all(load_acquire(&ring->tail, scope) != *head)) return false;
    *popped = entry((*head)++);
    team.sync();
    if (team.leader()) store_release(&ring->head, *head, scope);
    return true;
  }

  // The scheduler's promise to push nothing more for iterations before `iteration`.
  DISTMK_FN void close(const Team& team, uint64_t iteration) const {
    if (team.leader()) store_release(&ring->closed, iteration, scope);
  }
  // Whether the worker has popped every entry for iterations before `iteration`, and no more will be pushed for them.
  DISTMK_FN bool drained(const Team& team, uint64_t head, uint64_t iteration) const {
    return team.all(load_acquire(&ring->closed, scope) >= iteration && load_acquire(&ring->tail, scope) == head);
  }
};

DISTMK_FN JitRingView jit_ring_of(const RankState& state, uint32_t worker) {
  if (state.local_ring) return {state.local_ring, state.program->jit_capacity, Scope::BLOCK};
  return {state.ring(worker), state.program->jit_capacity, Scope::DEVICE};
}

}  // namespace distmk
