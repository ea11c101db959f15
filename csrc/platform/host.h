// The host twin's implementation of the primitives that platform/platform.h selects. A team is one thread, and the
// compiler's atomics give the memory order.
#pragma once
#include <sched.h>
#include <time.h>

#include <atomic>
#include <cstring>

#include "platform/planted_bug.h"

#define DISTMK_FN inline
#define DISTMK_NO_UNROLL  // for GPU loops of a single thread, which more code slows
#define DISTMK_UNROLL
#define DISTMK_NOINLINE inline
#define DISTMK_OUTLINED inline
#define DISTMK_BODY  // task bodies and the transport are in translation units of their own

namespace distmk {

// Threads that work together: always one on the host.
struct Team {
  static constexpr uint32_t index = 0, size = 1;
  bool leader() const { return true; }
  void sync() const {}
  bool all(bool mine) const { return mine; }
  uint32_t from_leader(uint32_t mine) const { return mine; }
  uint32_t votes(bool mine) const { return mine; }
};

DISTMK_FN uint64_t load_acquire(const uint64_t* p, Scope = Scope::DEVICE) {
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
// Whether a counter has reached `want`. If it has, everything written before the releases that raised it is visible.
DISTMK_FN bool has_reached(const uint64_t* p, uint64_t want, Scope = Scope::DEVICE) { return load_acquire(p) >= want; }
DISTMK_FN uint64_t load_relaxed(const uint64_t* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
DISTMK_FN void store_release(uint64_t* p, uint64_t v, Scope = Scope::DEVICE) {
  if (missing_release)
    __atomic_store_n(p, v, __ATOMIC_RELAXED);
  else
    __atomic_store_n(p, v, __ATOMIC_RELEASE);
}
DISTMK_FN void store_relaxed(uint64_t* p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
DISTMK_FN void add_release(uint64_t* p, uint64_t v, Scope = Scope::DEVICE) {
  if (missing_release)
    __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
  else
    __atomic_fetch_add(p, v, __ATOMIC_RELEASE);
}
DISTMK_FN uint64_t count_up(uint64_t* p) { return __atomic_add_fetch(p, 1, __ATOMIC_RELAXED); }
DISTMK_FN uint32_t min(uint32_t a, uint32_t b) { return a < b ? a : b; }
DISTMK_FN uint32_t max(uint32_t a, uint32_t b) { return a > b ? a : b; }
DISTMK_FN uint32_t floor_log2(uint32_t v) { return 31 - static_cast<uint32_t>(__builtin_clz(v)); }
DISTMK_FN uint32_t count_bits(uint32_t v) { return static_cast<uint32_t>(__builtin_popcount(v)); }
DISTMK_FN int32_t load_changing(const int32_t* p) { return *p; }
template <class T>
T load_vector(const T* p) {
  return *p;
}
DISTMK_FN void copy_bytes(const Team&, void* dst, const void* src, uint64_t num_bytes) { memcpy(dst, src, num_bytes); }

DISTMK_FN uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000ull + static_cast<uint64_t>(t.tv_nsec);
}

// Sum of size_of(item) over up to 32 items.
template <class SizeOf>
DISTMK_FN uint32_t sum_of_sizes(uint32_t num_items, const SizeOf& size_of) {
  uint32_t sum = 0;
  for (uint32_t item = 0; item < num_items; ++item) sum += size_of(item);
  return sum;
}
// Treats the items as concatenated. Returns the item that holds position `*index`, and makes `*index` the offset in
// that item.
template <class SizeOf>
DISTMK_FN uint32_t find_item(uint32_t, const SizeOf& size_of, uint32_t* index) {
  uint32_t item = 0;
  for (; *index >= size_of(item); ++item) *index -= size_of(item);
  return item;
}

DISTMK_FN void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Called between two polls of a wait that has lasted `idle_ns`. It first yields, because another worker may share the
// core. After YIELD_NS it sleeps for a thousandth of the time waited so far.
//
// A yield that takes long shows that the machine has other work: the awaited thread may have no core, and each yield
// may cost a time slice of milliseconds. For BUSY_NS this thread then sleeps at once. That leaves its core to others,
// and the kernel prefers a thread that has slept when it wakes.
DISTMK_FN void back_off(uint64_t idle_ns) {
  constexpr uint64_t YIELD_NS = 20000000, LONG_NS = 500000, BUSY_NS = 50000000, LEAST_NS = 20000, MOST_NS = 2000000;
  static thread_local uint64_t busy_until_ns = 0;
  const uint64_t now = now_ns();
  if (idle_ns <= YIELD_NS && now >= busy_until_ns) {
    sched_yield();
    const uint64_t after = now_ns();
    if (after - now > LONG_NS) busy_until_ns = after + BUSY_NS;
    return;
  }
  const uint64_t sleep_ns = idle_ns / 1000;
  timespec t{0, static_cast<long>(sleep_ns < LEAST_NS ? LEAST_NS : sleep_ns > MOST_NS ? MOST_NS : sleep_ns)};
  nanosleep(&t, nullptr);
}

}  // namespace distmk
