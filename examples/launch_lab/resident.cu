// Rung 11: a resident kernel that polls a ring in host memory for submissions.
//
// Block 0 polls over the bus and relays each submission to the other blocks through GPU memory. All blocks do a part of
// it, and the last block to finish signals the host. Every polling loop has a deadline: the kernel exits on request or
// at the end of its lifetime, whatever the host does.
#include "lab.cuh"

constexpr uint32_t LEAVE = ~0u;               // content of a submission that asks the kernel to exit
constexpr uint64_t GRACE_NS = 1'000'000'000;  // the relay's readers outlive block 0, its writer

// Polls a slot for submission `sequence`. Returns its word, or LEAVE at the time `until`. HOST: the slot is in host
// memory.
template <bool HOST>
__device__ uint64_t wait_for(const uint64_t* slot, uint32_t sequence, uint32_t backoff_ns, uint64_t until) {
  for (;;) {
    const uint64_t word = HOST ? load_acquire_sys(slot) : load_acquire(slot);
    if (sequence_of(word) == sequence) return word;
    if (now_ns() >= until) return uint64_t{sequence} << 32 | LEAVE;
    if (backoff_ns) __nanosleep(backoff_ns);
  }
}

struct Work {
  const float* x;
  float* y;
  uint32_t num;
  uint32_t pad;
  uint64_t* arrived;              // blocks that have finished, summed over all submissions
  unsigned long long* num_sines;  // summed over all submissions
  uint64_t* done;                 // in host memory: number of the last submission that is done
};

// All blocks call it: y = x after as many sines as `word` says.
__device__ void run(const Work& work, uint64_t word) {
  const uint32_t count = content_of(word);
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < work.num; i += gridDim.x * blockDim.x)
    work.y[i] = sines(work.x[i], count);
  __syncthreads();
  if (threadIdx.x) return;
  if (blockIdx.x == 0) atomicAdd(work.num_sines, static_cast<unsigned long long>(count));
  const uint64_t sequence = sequence_of(word);
  if (add_acq_rel(work.arrived, 1) + 1 == sequence * gridDim.x) store_release_sys(work.done, sequence);
}

// `ring` (host memory) and `relay` (GPU memory, initially 0) have `size` slots. The host reuses a slot only after the
// submission in it is done. `left`: receives the number of the submission at which the kernel exits.
extern "C" __global__ void resident(const uint64_t* ring, uint64_t* relay, uint32_t size, uint32_t backoff_ns,
                                    uint64_t lifetime_ns, Work work, uint64_t* left) {
  __shared__ uint64_t told;
  const uint64_t until = now_ns() + lifetime_ns;
  for (uint32_t sequence = 1;; ++sequence) {
    if (threadIdx.x == 0) {
      const uint32_t slot = sequence % size;
      if (blockIdx.x == 0) {
        told = wait_for<true>(ring + slot, sequence, backoff_ns, until);
        store_release(relay + slot, told);
      } else {
        told = wait_for<false>(relay + slot, sequence, backoff_ns, until + GRACE_NS);
      }
    }
    __syncthreads();
    const uint64_t word = told;
    __syncthreads();  // all threads have read `told` before it is written again
    if (content_of(word) == LEAVE) {
      if (blockIdx.x == 0 && threadIdx.x == 0) store_release_sys(left, sequence);
      return;
    }
    run(work, word);
  }
}

// Runs one submission in one launch. Its word is `word`, or *from if `from` is not null: a graph's arguments are fixed.
extern "C" __global__ void submission(uint64_t word, const uint64_t* from, Work work) {
  __shared__ uint64_t told;
  if (threadIdx.x == 0) told = from ? *from : word;
  __syncthreads();
  run(work, told);
}
