// Rung 10: a kernel that empties a queue and leaves. The queue lies in the host's memory, which adds to it meanwhile;
// who finds it empty exits, so that nothing here ever waits.
#include "lab.cuh"

// Slot i holds submission i + 1, and `tail` how many there are, once they are there. `head`: submissions taken so far,
// over all launches; `known`: those that a block has seen to be there, so that a look over the bus serves all blocks.
// An item is blockDim.x elements, put through as many sines as its word says.
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
        seen = before;  // somebody else took it
      }
    }
    __syncthreads();
    const uint64_t word = taken;
    __syncthreads();  // all have read it before it is written again
    if (!word) return;
    float& value = x[(sequence_of(word) - 1) * blockDim.x + threadIdx.x];
    value = sines(value, content_of(word));
  }
}

// The items of one burst by a launch of its own: a block an item, from submission `first` + 1 on.
extern "C" __global__ void burst(const uint64_t* slots, uint32_t first, float* x) {
  __shared__ uint64_t taken;
  if (threadIdx.x == 0) taken = load_acquire_sys(slots + first + blockIdx.x);
  __syncthreads();
  float& value = x[(first + blockIdx.x) * blockDim.x + threadIdx.x];
  value = sines(value, content_of(taken));
}
