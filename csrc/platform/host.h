// The host twin's side of platform.h: a team is one thread, and memory order is the compiler's atomics.
#pragma once
#include <sched.h>
#include <time.h>

#include <atomic>
#include <cstring>

#define DISTMK_FN inline
#define DISTMK_NO_UNROLL  // before a loop that a GPU had better not unroll: its single thread is slowed by every
                          // instruction
#define DISTMK_NOINLINE inline
#define DISTMK_BODY  // task bodies and far ranks are compiled apart

namespace distmk {

// A planted fault for the race detector's own test: without the release, a reader may see old data.
#ifdef DISTMK_PLANT_MISSING_RELEASE
constexpr auto RELEASE = std::memory_order_relaxed;
#else
constexpr auto RELEASE = std::memory_order_release;
#endif

// The threads that do something together: here one.
struct Team {
  static constexpr uint32_t index = 0, size = 1;
  bool leader() const { return true; }
  void sync() const {}
  bool all(bool mine) const { return mine; }
};

DISTMK_FN uint64_t load_acquire(const uint64_t* p, Scope = Scope::DEVICE) {
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
// Whether a counter has reached `want`; if so, what was released with it can be read.
DISTMK_FN bool has_reached(const uint64_t* p, uint64_t want, Scope = Scope::DEVICE) { return load_acquire(p) >= want; }
DISTMK_FN uint64_t load_relaxed(const uint64_t* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
DISTMK_FN void store_release(uint64_t* p, uint64_t v, Scope = Scope::DEVICE) {
  __atomic_store_n(p, v, static_cast<int>(RELEASE));
}
DISTMK_FN void store_relaxed(uint64_t* p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
DISTMK_FN void add_release(uint64_t* p, uint64_t v, Scope = Scope::DEVICE) {
  __atomic_fetch_add(p, v, static_cast<int>(RELEASE));
}
DISTMK_FN uint64_t count_up(uint64_t* p) { return __atomic_add_fetch(p, 1, __ATOMIC_RELAXED); }
DISTMK_FN void copy_bytes(const Team&, void* dst, const void* src, uint64_t num_bytes) { memcpy(dst, src, num_bytes); }

DISTMK_FN uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000ull + static_cast<uint64_t>(t.tv_nsec);
}

// Of up to 32 items, the sizes of which `size_of` knows; the GPU's warps come here together.
template <class SizeOf>
DISTMK_FN uint32_t sum_of_sizes(uint32_t num_items, const SizeOf& size_of) {
  uint32_t sum = 0;
  for (uint32_t item = 0; item < num_items; ++item) sum += size_of(item);
  return sum;
}
// Which item place `index` of them all, one after another, belongs to; `index` becomes the place in it.
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

DISTMK_FN void back_off(bool long_idle) {
  if (!long_idle) {
    sched_yield();
    return;
  }
  timespec t{0, 50000};
  nanosleep(&t, nullptr);
}

}  // namespace distmk
