// The GPU side of runtime/platform.h. A team is the threads that run a body together: a worker's consumer warps, or one
// thread of a scheduler warp. Only its leader waits and signals; the team's barriers carry that order to the others.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#define DISTMK_FN __device__ __forceinline__
#define DISTMK_BODY DISTMK_FN

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

// Scope: an event that peers signal is read and written at system scope, any other at that of the GPU.
DISTMK_FN uint64_t load_acquire(const uint64_t* p, bool system = false) {
  uint64_t v;
  if (system)
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  else
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
DISTMK_FN uint64_t load_relaxed(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
DISTMK_FN void store_release(uint64_t* p, uint64_t v, bool system = false) {
  if (system)
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
  else
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
DISTMK_FN void store_relaxed(uint64_t* p, uint64_t v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
DISTMK_FN void add_release(uint64_t* p, uint64_t v, bool system = false) {
  if (system)
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
DISTMK_FN void copy_bytes(const Team& team, void* dst, const void* src, uint64_t num_bytes) {
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
