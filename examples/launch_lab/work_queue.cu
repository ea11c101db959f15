// Rung 8: items of uneven cost, scheduled statically (round-robin) or dynamically (by an atomic counter).
#include "lab.cuh"

// A block's begin and end, and its number of items.
struct Share {
  uint64_t begin_ns, end_ns, num_items;
};

// An item is blockDim.x elements; costs[item] * NUM_SINES sines are applied to each.
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

// The host resets `next` to 0.
extern "C" __global__ void items_queue(float* x, const uint32_t* costs, uint32_t num_items, Share* shares,
                                       uint32_t* next) {
  __shared__ uint32_t taken;
  const uint64_t begin = now_ns();
  for (uint64_t count = 0;; ++count) {
    if (threadIdx.x == 0) taken = atomicAdd(next, 1);
    __syncthreads();
    const uint32_t item = taken;
    __syncthreads();  // all threads have read `taken` before it is written again
    if (item >= num_items) return note(shares, begin, count);
    work(x, costs, item);
  }
}
