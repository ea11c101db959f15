// The GPU side of runtime/platform.h. A team is the threads that do something together: a worker's consumer warps, or
// the lanes of one warp. What one of them acquires or releases, the team's barriers carry from and to the others.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#define DISTMK_FN __device__ __forceinline__
#define DISTMK_BODY DISTMK_FN
#define DISTMK_ROLLED _Pragma("unroll 1")

namespace distmk {

constexpr uint32_t NUM_CONSUMERS = 256;
constexpr uint32_t CONSUMER_BARRIER = 1;  // barrier 0 is __syncthreads'

struct Team {
  uint32_t index, size;

  DISTMK_FN bool leader() const { return index == 0; }
  DISTMK_FN void sync() const {
    if (size == NUM_CONSUMERS)
      asm volatile("bar.sync %0, %1;" ::"n"(CONSUMER_BARRIER), "n"(NUM_CONSUMERS) : "memory");
    else if (size != 1)
      __syncwarp();
  }
  // Of a warp or one thread.
  DISTMK_FN bool all(bool mine) const { return size == 1 ? mine : __all_sync(~0u, mine); }
};

// Scope: an event that peers signal is read and written at system scope, any other at that of the GPU. Only what a
// worker's own threads tell each other may lie in shared memory.
DISTMK_FN uint64_t load_acquire(const uint64_t* p, Scope scope = Scope::DEVICE) {
  uint64_t v;
  if (scope == Scope::SYSTEM)
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  else if (scope == Scope::DEVICE)
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  else
    asm volatile("ld.acquire.cta.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
DISTMK_FN uint64_t load_relaxed(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.relaxed.sys.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
// Whether a counter has reached `want`; if so, what was released with it can be read. An acquire empties the
// first-level cache, so while the answer is no it is asked without.
DISTMK_FN bool has_reached(const uint64_t* p, uint64_t want, Scope scope = Scope::DEVICE) {
  uint64_t v;
  if (scope == Scope::SYSTEM)
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  else
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v >= want && load_acquire(p, scope) >= want;
}
DISTMK_FN void store_release(uint64_t* p, uint64_t v, Scope scope = Scope::DEVICE) {
  if (scope == Scope::SYSTEM)
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
  else if (scope == Scope::DEVICE)
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
  else
    asm volatile("st.release.cta.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
DISTMK_FN void store_relaxed(uint64_t* p, uint64_t v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
DISTMK_FN void add_release(uint64_t* p, uint64_t v, Scope scope = Scope::DEVICE) {
  if (scope == Scope::SYSTEM)
    asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
  else
    asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

DISTMK_FN uint64_t now_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}
DISTMK_FN uint64_t count_up(uint64_t* p) { return atomicAdd(reinterpret_cast<unsigned long long*>(p), 1ull) + 1; }
DISTMK_FN void pause() {}
DISTMK_FN void give_way(bool long_idle) { __nanosleep(long_idle ? 2000 : 40); }

// Copy with all of a team. Sources were written during the kernel, so they are not read through the non-coherent path.
// A function of its own: there are many places that copy a little.
static __device__ __noinline__ void copy_bytes(const Team team, void* dst, const void* src, uint64_t num_bytes) {
  const uint64_t misaligned = (reinterpret_cast<uint64_t>(dst) | reinterpret_cast<uint64_t>(src) | num_bytes);
  if (misaligned % 16 == 0) {
    for (uint64_t i = team.index; i < num_bytes / 16; i += team.size)
      static_cast<int4*>(dst)[i] = static_cast<const int4*>(src)[i];  // perhaps from shared memory
  } else if (misaligned % 4 == 0) {
    for (uint64_t i = team.index; i < num_bytes / 4; i += team.size)
      static_cast<volatile uint32_t*>(dst)[i] = static_cast<const volatile uint32_t*>(src)[i];
  } else {
    for (uint64_t i = team.index; i < num_bytes; i += team.size)
      static_cast<volatile uint8_t*>(dst)[i] = static_cast<const volatile uint8_t*>(src)[i];
  }
}

}  // namespace distmk
