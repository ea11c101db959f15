// Rung 8: items that take unevenly long, dealt out in turn, or taken from a counter by whoever is free.
#include "lab.cuh"

// When a block began and ended, and how many items it had.
struct Share {
  uint64_t begin_ns, end_ns, num_items;
};

// An item is blockDim.x elements, each put through `cost` times the sines.
__device__ void work(float* x, const uint32_t* costs, uint32_t item) {
  float& value = x[item * blockDim.x + threadIdx.x];
  value = sines(value, costs[item] * NUM_SINES);
}

__device__ void note(Share* shares, uint64_t begin_ns, uint64_t num_items) {
  __syncthreads();
  if (threadIdx.x == 0) shares[blockIdx.x] = {begin_ns, now_ns(), num_items};
}

extern "C" __global__ void items_static(float* x, const uint32_t* costs, uint32_t num_items, Share* shares) {
  const uint64_t begin = now_ns();
  uint64_t count = 0;
  for (uint32_t item = blockIdx.x; item < num_items; item += gridDim.x, ++count) work(x, costs, item);
  note(shares, begin, count);
}

// `next` is 0 at first.
extern "C" __global__ void items_queue(float* x, const uint32_t* costs, uint32_t num_items, Share* shares,
                                       uint32_t* next) {
  __shared__ uint32_t taken;
  const uint64_t begin = now_ns();
  for (uint64_t count = 0;; ++count) {
    if (threadIdx.x == 0) taken = atomicAdd(next, 1);
    __syncthreads();
    const uint32_t item = taken;
    __syncthreads();  // all have read it before it is written again
    if (item >= num_items) return note(shares, begin, count);
    work(x, costs, item);
  }
}
