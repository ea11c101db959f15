// Reads memory once, as the megakernel's loader does, and computes nothing: the most that weights can stream at. A
// block an SM; one lane copies stages of 8 KB into a ring of shared memory, warps give each back once it is there.
#include <cstdint>

namespace {

constexpr uint32_t STAGE_BYTES = 8192;
constexpr uint32_t NUM_DRAINERS = 8;  // warps, behind which the loader's comes

#if __CUDA_ARCH__ >= 900
constexpr uint32_t NUM_STAGES = 16;

struct Place {
  uint32_t slot = 0, parity = 0;

  __device__ void step(uint32_t by = 1) {
    slot += by;
    if (slot < NUM_STAGES) return;
    slot -= NUM_STAGES;
    parity ^= 1;
  }
};

__device__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// The loop is the assembler's: the compiler would give way to other warps in each round of its own.
__device__ void wait(uint32_t barriers, const Place& place) {
  asm volatile(
      "{ .reg .pred p; again: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @p bra done; bra again; done: }" ::"r"(
          barriers + place.slot * 8),
      "r"(place.parity)
      : "memory");
}

__device__ void load(const char* src, uint64_t num_stages, uint64_t max_in_flight, uint32_t full, uint32_t empty,
                     uint32_t slots) {
  Place next, oldest;
  uint64_t landed = 0;
  for (uint64_t issued = 0; issued < num_stages; ++issued, src += STAGE_BYTES) {
    if (issued - landed == max_in_flight) {
      wait(full, oldest);
      oldest.step();
      ++landed;
    }
    wait(empty, {next.slot, next.parity ^ 1});
    const uint32_t barrier = full + next.slot * 8;
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(STAGE_BYTES));
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     slots + next.slot * STAGE_BYTES),
                 "l"(src), "r"(STAGE_BYTES), "r"(barrier)
                 : "memory");
    next.step();
  }
}

__device__ void drain(uint32_t warp, uint64_t num_stages, uint32_t full, uint32_t empty) {
  Place place{warp, 0};
  for (uint64_t stage = warp; stage < num_stages; stage += NUM_DRAINERS) {
    wait(full, place);
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(empty + place.slot * 8) : "memory");
    place.step(NUM_DRAINERS);
  }
}
#else
// No bulk copies there: 16 bytes a lane, eight loads under way at once. `num_stages` is a multiple of 4.
__device__ uint32_t read(const char* src, uint64_t num_stages) {
  constexpr uint32_t NUM_LOADS = 8, NUM_THREADS = NUM_DRAINERS * 32;
  const auto* words = reinterpret_cast<const uint4*>(src) + threadIdx.x;
  const uint4* end = reinterpret_cast<const uint4*>(src + num_stages * STAGE_BYTES);
  uint32_t seen = 0;
  for (; words < end; words += NUM_LOADS * NUM_THREADS) {
    uint4 loaded[NUM_LOADS];
#pragma unroll
    for (uint32_t i = 0; i < NUM_LOADS; ++i) loaded[i] = __ldg(words + i * NUM_THREADS);
#pragma unroll
    for (uint32_t i = 0; i < NUM_LOADS; ++i) seen |= loaded[i].x | loaded[i].y | loaded[i].z | loaded[i].w;
  }
  return seen;
}
#endif

}  // namespace

// Block b reads stages [b * num_stages, (b + 1) * num_stages) of `data`, with at most `max_in_flight` copies under way.
// Launched with NUM_DRAINERS + 1 warps and NUM_STAGES * STAGE_BYTES of dynamic shared memory. `sink` is never written.
extern "C" __global__ void distmk_stream_probe(const char* data, uint64_t num_stages, uint64_t max_in_flight,
                                               uint32_t* sink) {
  const char* src = data + blockIdx.x * num_stages * STAGE_BYTES;
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char slots[];
  __shared__ uint64_t full[NUM_STAGES], empty[NUM_STAGES];
  if (threadIdx.x == 0) {
    for (uint32_t s = 0; s < NUM_STAGES; ++s) {
      asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(&full[s])));
      asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(&empty[s])));
    }
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  __syncthreads();
  if (threadIdx.x % 32) return;
  const uint32_t warp = threadIdx.x / 32;
  if (warp == NUM_DRAINERS)
    load(src, num_stages, max_in_flight, shared_address(full), shared_address(empty), shared_address(slots));
  else
    drain(warp, num_stages, shared_address(full), shared_address(empty));
#else
  if (threadIdx.x >= NUM_DRAINERS * 32) return;
  const uint32_t seen = read(src, num_stages);
  if (seen == max_in_flight) *sink = seen;  // the compiler must think that somebody looks
#endif
}
