// A worker's just-in-time ring: its owning scheduler pushes, the worker pops. It lies on the heap, or at hand where
// both are parts of one worker.
#pragma once
#include "runtime/context.h"

namespace distmk {

constexpr uint64_t NEVER_MORE = ~0ull;  // closed for good

struct RingView {
  JitRing* ring;
  uint32_t capacity;
  Scope scope;

  DISTMK_FN JitEntry& entry(uint64_t n) const { return reinterpret_cast<JitEntry*>(ring + 1)[n & (capacity - 1)]; }

  DISTMK_FN bool push(const Team& team, const JitEntry& what) const {
    const uint64_t tail = load_relaxed(&ring->tail);
    if (!team.all(tail - load_acquire(&ring->head, scope) < capacity)) return false;
    if (team.leader()) {
      entry(tail) = what;
      store_release(&ring->tail, tail + 1, scope);
    }
    team.sync();
    return true;
  }

  // `head` is the worker's own count of what it popped; the ring's copy tells the scheduler.
  DISTMK_FN bool pop(const Team& team, uint64_t* head, JitEntry* what) const {
    if (!team.all(load_acquire(&ring->tail, scope) != *head)) return false;  // each thread has to see it for itself
    *what = entry((*head)++);
    team.sync();
    if (team.leader()) store_release(&ring->head, *head, scope);
    return true;
  }

  // Nothing more will be pushed for what is before `iteration`.
  DISTMK_FN void close(const Team& team, uint64_t iteration) const {
    if (team.leader()) store_release(&ring->closed, iteration, scope);
  }
  // Nothing is left of what is before `iteration`, and nothing more will come.
  DISTMK_FN bool finished(const Team& team, uint64_t head, uint64_t iteration) const {
    return team.all(load_acquire(&ring->closed, scope) >= iteration && load_acquire(&ring->tail, scope) == head);
  }
};

DISTMK_FN RingView ring_of(const RankState& state, uint32_t worker) {
  if (state.local_ring) return {state.local_ring, state.program->jit_capacity, Scope::BLOCK};
  return {state.ring(worker), state.program->jit_capacity, Scope::DEVICE};
}

}  // namespace distmk
