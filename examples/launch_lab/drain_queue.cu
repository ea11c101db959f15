// Rung 10: a kernel that drains a queue in host memory while the host still adds to it. A block that finds the queue
// empty exits, so no block ever waits.
#include "lab.cuh"

// `slots`, `tail`: in host memory. Slot i holds submission i + 1; `tail` is the number of submissions, written after
// their slots. `head`: number of submissions taken, over all launches. `known`: the largest tail that any block has
// read, so that one read over the bus serves all blocks. An item is blockDim.x elements, and its word says how many
// sines to apply.
extern "C" __global__ void drain(const uint64_t* slots, const uint64_t* tail, uint32_t* head, uint32_t* known,
                                 float* x) {
  __shared__ uint64_t taken;
  for (;;) {
    if (threadIdx.x == 0) {
      taken = 0;
      for (uint32_t seen = atomicAdd(head, 0);;) {
        if (seen >= atomicAdd(known, 0)) {
          const auto there = static_cast<uint32_t>(load_acquire_sys(tail));
          atomicMax(known, there);
          if (seen >= there) break;  // empty
        }
        const uint32_t before = atomicCAS(head, seen, seen + 1);
        if (before == seen) {
          taken = load_acquire_sys(slots + seen);
          break;
        }
        seen = before;  // another block took it
      }
    }
    __syncthreads();
    const uint64_t word = taken;
    __syncthreads();  // all threads have read `taken` before it is written again
    if (!word) return;
    float& value = x[(sequence_of(word) - 1) * blockDim.x + threadIdx.x];
    value = sines(value, content_of(word));
  }
}

// Runs the items of one burst in one launch, from submission `first` + 1 on, with one block per item.
extern "C" __global__ void burst(const uint64_t* slots, uint32_t first, float* x) {
  __shared__ uint64_t taken;
  if (threadIdx.x == 0) taken = load_acquire_sys(slots + first + blockIdx.x);
  __syncthreads();
  float& value = x[(first + blockIdx.x) * blockDim.x + threadIdx.x];
  value = sines(value, content_of(taken));
}
