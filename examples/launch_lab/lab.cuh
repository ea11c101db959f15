// Helpers for the kernels of the launch lab (README.md): the work, time stamps, and words for synchronisation with the
// host.
#pragma once
#include <cstdint>

constexpr uint32_t NUM_SINES = 20;  // sines per element of a short kernel

// The work of one element: a dependent chain, which the compiler cannot shorten.
__device__ __forceinline__ float sines(float value, uint32_t count = NUM_SINES) {
#pragma unroll 1
  for (uint32_t i = 0; i < count; ++i) value = sinf(value);
  return value;
}

__device__ __forceinline__ uint64_t now_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)::"memory");
  return t;
}

// Begin of a kernel's first block and end of its last one, in ns. The host initialises begin to ~0 and end to 0.
struct Stamp {
  unsigned long long begin, end;
};

// Blocks start in order, so only the first and last blocks can set a stamp. The others skip the atomics.
constexpr uint32_t NUM_EDGE_BLOCKS = 2048;

__device__ __forceinline__ void stamp_begin(Stamp* stamp) {
  if (stamp && threadIdx.x == 0 && blockIdx.x < NUM_EDGE_BLOCKS) atomicMin(&stamp->begin, now_ns());
}
__device__ __forceinline__ void stamp_end(Stamp* stamp) {
  if (!stamp) return;
  __syncthreads();
  if (threadIdx.x == 0 && blockIdx.x + NUM_EDGE_BLOCKS >= gridDim.x) atomicMax(&stamp->end, now_ns());
}

// Loads and stores of words shared with the host (system scope, _sys) or with other blocks (GPU scope).
__device__ __forceinline__ uint64_t load_acquire_sys(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_release_sys(uint64_t* p, uint64_t v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ uint64_t load_acquire(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_release(uint64_t* p, uint64_t v) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
// Returns the old value.
__device__ __forceinline__ uint64_t add_acq_rel(uint64_t* p, uint64_t v) {
  uint64_t old;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(p), "l"(v) : "memory");
  return old;
}

// A queue slot is one word, so that one store publishes it whole: the submission's number, from 1 on, and its content.
__device__ __forceinline__ uint32_t sequence_of(uint64_t word) { return static_cast<uint32_t>(word >> 32); }
__device__ __forceinline__ uint32_t content_of(uint64_t word) { return static_cast<uint32_t>(word); }
