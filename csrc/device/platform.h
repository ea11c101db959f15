// The GPU side of runtime/platform.h. A team is the threads that do something together: a worker's consumer warps, or
// the lanes of one warp. What one of them acquires or releases, the team's barriers carry from and to the others.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "runtime/scope.h"

#define DISTMK_FN __device__ __forceinline__

#ifdef DISTMK_EMULATED
#include "emulator/ptx.h"
#else
#include "device/ptx.cuh"
#endif

#define DISTMK_BODY DISTMK_FN
#define DISTMK_ROLLED _Pragma("unroll 1")

namespace distmk {

constexpr uint32_t NUM_CONSUMERS = 256;

struct Team {
  uint32_t index, size;

  DISTMK_FN bool leader() const { return index == 0; }
  DISTMK_FN void sync() const {
    if (size == NUM_CONSUMERS)
      barrier_sync<NUM_CONSUMERS>();
    else if (size != 1)
      __syncwarp();
  }
  // Of a warp or one thread.
  DISTMK_FN bool all(bool mine) const { return size == 1 ? mine : __all_sync(~0u, mine); }
};

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
