// The GPU implementation of the primitives that platform/platform.h selects. The emulator compiles it too, with its own
// replacement for PTX.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "platform/scope.h"

#define DISTMK_FN __device__ __forceinline__
#define DISTMK_CONSTANT static __constant__

namespace distmk {
// compute-sanitizer's racecheck lets an mbarrier arrival order only the accesses of the arriving thread, and it reports
// polled flags as races. In a kernel that is built for racecheck, every lane therefore arrives for itself and flags are
// atomic.
#ifdef DISTMK_RACECHECK
constexpr bool FOR_RACECHECK = true;
#else
constexpr bool FOR_RACECHECK = false;
#endif
}  // namespace distmk

#ifdef DISTMK_EMULATED
#include "emulator/ptx.h"
#else
#include "platform/ptx.cuh"
#endif

#define DISTMK_BODY DISTMK_FN
#define DISTMK_NOINLINE static __device__ __noinline__  // keeps its registers and instructions out of its callers
#define DISTMK_OUTLINED __device__ __noinline__         // DISTMK_NOINLINE for member functions
#define DISTMK_NO_UNROLL _Pragma("unroll 1")
#define DISTMK_UNROLL _Pragma("unroll")

namespace distmk {

constexpr uint32_t NUM_CONSUMERS = 256;  // consumer threads of a worker
constexpr uint32_t NUM_WARPS = NUM_CONSUMERS / 32;
constexpr uint32_t WARP_ARRIVALS = FOR_RACECHECK ? 32 : 1;

// A whole warp arrives `times` times at an mbarrier whose expected count has WARP_ARRIVALS for each warp.
DISTMK_FN void warp_arrive(uint64_t* barrier, uint32_t times = 1) {
  __syncwarp();
  if (FOR_RACECHECK || threadIdx.x % 32 == 0) barrier_arrive(barrier, times);
}

// A word in shared memory that one thread writes and others poll. It orders no other memory.
struct Flag {
  uint32_t value;

#ifdef DISTMK_RACECHECK
  DISTMK_FN uint32_t get() const { return atomicOr(const_cast<uint32_t*>(&value), 0u); }
  DISTMK_FN void set(uint32_t v) { atomicExch(&value, v); }
#else
  DISTMK_FN uint32_t get() const { return *const_cast<const volatile uint32_t*>(&value); }
  DISTMK_FN void set(uint32_t v) { *const_cast<volatile uint32_t*>(&value) = v; }
#endif
};

// Threads that work together: a worker's consumer warps, the lanes of one warp, or a single thread. sync() extends an
// acquire by one thread to the whole team. It also makes the team's writes part of a later release by one thread.
struct Team {
  uint32_t index, size;

  DISTMK_FN bool leader() const { return index == 0; }
  DISTMK_FN void sync() const {
    if (size == NUM_CONSUMERS)
      barrier_sync<NUM_CONSUMERS>();
    else if (size != 1)
      __syncwarp();
  }
  // A vote, for a team of one warp or one thread. It orders no memory.
  DISTMK_FN bool all(bool mine) const { return size == 1 ? mine : __all_sync(~0u, mine); }
  // Broadcasts the leader's number, under the restrictions of all().
  DISTMK_FN uint32_t from_leader(uint32_t mine) const { return size == 1 ? mine : __shfl_sync(~0u, mine, 0); }
  // The votes of all threads, one bit each, in the order of their indices; under the restrictions of all().
  DISTMK_FN uint32_t votes(bool mine) const { return size == 1 ? mine : __ballot_sync(~0u, mine); }
};

DISTMK_FN uint64_t count_up(uint64_t* p) { return atomicAdd(reinterpret_cast<unsigned long long*>(p), 1ull) + 1; }
// Sum of size_of(item) over up to 32 items. A whole warp calls it, with one item per lane.
template <class SizeOf>
DISTMK_FN uint32_t sum_of_sizes(uint32_t num_items, const SizeOf& size_of) {
  const uint32_t lane = threadIdx.x % 32;
  return __reduce_add_sync(~0u, lane < num_items ? size_of(lane) : 0);
}
// Treats the items as concatenated. Returns the item that holds position `*index`, and makes `*index` the offset in
// that item.
template <class SizeOf>
DISTMK_FN uint32_t find_item(uint32_t num_items, const SizeOf& size_of, uint32_t* index) {
  const uint32_t lane = threadIdx.x % 32, size = lane < num_items ? size_of(lane) : 0;
  uint32_t end = size;
  for (uint32_t step = 1; step < 32; step <<= 1) {
    const uint32_t before = __shfl_up_sync(~0u, end, step);
    if (lane >= step) end += before;
  }
  const uint32_t item = __ffs(static_cast<int>(__ballot_sync(~0u, end > *index))) - 1;
  *index -= __shfl_sync(~0u, end - size, item);
  return item;
}

DISTMK_FN void pause() {}
// Called between two polls of a wait that has lasted `idle_ns`.
DISTMK_FN void back_off(uint64_t idle_ns) { __nanosleep(idle_ns > 20000000 ? 2000 : 40); }

// `v` must be positive.
DISTMK_FN uint32_t floor_log2(uint32_t v) { return 31 - static_cast<uint32_t>(__clz(static_cast<int>(v))); }
DISTMK_FN uint32_t count_bits(uint32_t v) { return static_cast<uint32_t>(__popc(v)); }

// Loads a word, or 16 bytes, that may have been written since the kernel started: past L1, whose lines may be stale.
DISTMK_FN int32_t load_changing(const int32_t* p) { return __ldcg(p); }
template <class T>
DISTMK_FN T load_vector(const T* p) {
  static_assert(sizeof(T) == sizeof(int4), "");
  const int4 raw = __ldcg(reinterpret_cast<const int4*>(p));
  return *reinterpret_cast<const T*>(&raw);
}

// Copies with all threads of the team. The source may have been written during the kernel, so loads do not take the
// non-coherent path. Not inlined, because many callers copy only a little.
static __device__ __noinline__ void copy_bytes(const Team team, void* dst, const void* src, uint64_t num_bytes) {
  const uint64_t misaligned = (reinterpret_cast<uint64_t>(dst) | reinterpret_cast<uint64_t>(src) | num_bytes);
  if (misaligned % 16 == 0) {
    for (uint64_t i = team.index; i < num_bytes / 16; i += team.size)
      static_cast<int4*>(dst)[i] = static_cast<const int4*>(src)[i];  // src may be shared memory
  } else if (misaligned % 4 == 0) {
    for (uint64_t i = team.index; i < num_bytes / 4; i += team.size)
      static_cast<volatile uint32_t*>(dst)[i] = static_cast<const volatile uint32_t*>(src)[i];
  } else {
    for (uint64_t i = team.index; i < num_bytes; i += team.size)
      static_cast<volatile uint8_t*>(dst)[i] = static_cast<const volatile uint8_t*>(src)[i];
  }
}

}  // namespace distmk
