// A worker's just-in-time ring: its owning scheduler pushes, the worker pops.
#pragma once
#include "runtime/context.h"

namespace distmk {

DISTMK_FN bool ring_push(JitRing* ring, uint32_t capacity, const JitEntry& entry) {
  const uint64_t tail = load_relaxed(&ring->tail);
  if (tail - load_acquire(&ring->head) == capacity) return false;
  reinterpret_cast<JitEntry*>(ring + 1)[tail & (capacity - 1)] = entry;
  store_release(&ring->tail, tail + 1);
  return true;
}

// `head` is the worker's own count of what it popped; the ring's copy tells the scheduler.
DISTMK_FN bool ring_pop(JitRing* ring, uint32_t capacity, uint64_t* head, JitEntry* entry) {
  if (load_acquire(&ring->tail) == *head) return false;
  *entry = reinterpret_cast<const JitEntry*>(ring + 1)[*head & (capacity - 1)];
  store_release(&ring->head, ++*head);
  return true;
}

}  // namespace distmk
