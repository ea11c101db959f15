// What the kernels of the launch lab share: the work, time stamps, and words that several processors look at.
#pragma once
#include <cstdint>

constexpr uint32_t NUM_SINES = 20;  // of a short kernel

// The work of one element: a chain that nothing can shorten.
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

// When a kernel's first block began and its last one ended. Made ready by the host: begin all ones, end 0.
struct Stamp {
  unsigned long long begin, end;
};

// Blocks start in order, so only these can be the first to begin or the last to end; no others meet at the stamp.
constexpr uint32_t NUM_EDGE_BLOCKS = 2048;

__device__ __forceinline__ void stamp_begin(Stamp* stamp) {
  if (stamp && threadIdx.x == 0 && blockIdx.x < NUM_EDGE_BLOCKS) atomicMin(&stamp->begin, now_ns());
}
__device__ __forceinline__ void stamp_end(Stamp* stamp) {
  if (!stamp) return;
  __syncthreads();
  if (threadIdx.x == 0 && blockIdx.x + NUM_EDGE_BLOCKS >= gridDim.x) atomicMax(&stamp->end, now_ns());
}

// Words that the host (sys) or other blocks (gpu) write or read meanwhile. What was written before a release is seen
// after the acquire that reads it.
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
// Returns what was there.
__device__ __forceinline__ uint64_t add_acq_rel(uint64_t* p, uint64_t v) {
  uint64_t old;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(p), "l"(v) : "memory");
  return old;
}

// A queue's slot is one word, so that one store tells all of it: which submission it is (from 1 on), and what to do.
__device__ __forceinline__ uint32_t sequence_of(uint64_t word) { return static_cast<uint32_t>(word >> 32); }
__device__ __forceinline__ uint32_t content_of(uint64_t word) { return static_cast<uint32_t>(word); }
