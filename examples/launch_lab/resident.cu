// Rung 11: a kernel that stays, and polls a ring in the host's memory for what to do.
//
// Block 0 polls over the bus and hands what comes to the other blocks through the GPU's memory. All do their part of
// it; the last one to be done tells the host. Every loop that waits also looks at the clock: the kernel leaves when it
// is told to, or when its time is over, whatever the host does.
#include "lab.cuh"

constexpr uint32_t LEAVE = ~0u;               // a submission's content: not a number of sines
constexpr uint64_t GRACE_NS = 1'000'000'000;  // blocks that are told what to do outlast the one that tells them

// A slot's word once it is submission `sequence`; at `until` it is LEAVE.
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
  uint64_t* arrived;              // blocks that were done, over all submissions from 1 on
  unsigned long long* num_sines;  // of all submissions together
  uint64_t* done;                 // in the host's memory: the last submission that is done
};

// y = sines of x, as many as `word` says, by all blocks.
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

// `ring` (the host's memory) and `relay` (the GPU's, zeros at first) have `size` slots; the host leaves a slot alone
// until the submission in it is done. `left`: where the kernel's end is noted, the number of submissions + 1.
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
    __syncthreads();  // all have read it before it is written again
    if (content_of(word) == LEAVE) {
      if (blockIdx.x == 0 && threadIdx.x == 0) store_release_sys(left, sequence);
      return;
    }
    run(work, word);
  }
}

// The same submission by a launch of its own: `word`, or what lies at `from` where that is not null (a graph's
// arguments are fixed).
extern "C" __global__ void submission(uint64_t word, const uint64_t* from, Work work) {
  __shared__ uint64_t told;
  if (threadIdx.x == 0) told = from ? *from : word;
  __syncthreads();
  run(work, told);
}
