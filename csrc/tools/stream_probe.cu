// Read bandwidth probe: reads memory once, as the megakernel's loader does, and computes nothing. This is an upper
// bound for the rate at which weights can stream. One block per SM; one lane copies stages into a shared-memory
// pipeline, and the other warps release each stage once it is full. distmk/backends/cuda/probe.py defines the sizes.
#include <cstdint>

#include "device/core/pipeline.cuh"

namespace {

constexpr uint32_t STAGE_BYTES = PROBE_STAGE_BYTES, NUM_STAGES = PROBE_NUM_STAGES;
constexpr uint32_t NUM_DRAINERS = PROBE_NUM_DRAINERS;  // consumer warps; the loader is the warp after them

using State = distmk::PipelineState<NUM_STAGES>;

struct Barriers {
  uint64_t full[NUM_STAGES], empty[NUM_STAGES];
};

DISTMK_FN void load(const char* src, uint64_t num_stages, uint64_t max_in_flight, Barriers& barriers,
                    const char* stages) {
  // Opaque, because the compiler would otherwise compute the addresses anew for every copy.
  const uint32_t full = distmk::opaque(distmk::shared_address(barriers.full));
  const uint32_t empty = distmk::opaque(distmk::shared_address(barriers.empty));
  const uint32_t first_stage = distmk::opaque(distmk::shared_address(stages));
  State next, oldest;
  uint64_t landed = 0;
  for (uint64_t issued = 0; issued < num_stages; ++issued, src += STAGE_BYTES) {
    if (issued - landed == max_in_flight) {
      distmk::barrier_wait(full + oldest.index * 8, oldest.phase);
      oldest.advance();
      ++landed;
    }
    distmk::barrier_wait(empty + next.index * 8, next.phase ^ 1);
    distmk::copy_bulk(first_stage + next.index * STAGE_BYTES, src, STAGE_BYTES, full + next.index * 8);
    next.advance();
  }
}

DISTMK_FN void drain(uint32_t warp, uint64_t num_stages, Barriers& barriers) {
  State state;
  for (uint64_t stage = 0; stage < num_stages; ++stage, state.advance()) {
    if (stage % NUM_DRAINERS != warp) continue;
    distmk::barrier_wait(&barriers.full[state.index], state.phase);
    distmk::barrier_arrive(&barriers.empty[state.index]);
  }
}

// For GPUs without bulk copies: 16 bytes per lane, eight loads in flight. `num_stages` is a multiple of 4.
DISTMK_FN uint32_t read(const char* src, uint64_t num_stages) {
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

}  // namespace

// Block b reads stages [b * num_stages, (b + 1) * num_stages) of `data`, with at most `max_in_flight` copies in flight.
// Launched with NUM_DRAINERS + 1 warps and NUM_STAGES * STAGE_BYTES of dynamic shared memory. `sink` is never written.
extern "C" __global__ void distmk_stream_probe(const char* data, uint64_t num_stages, uint64_t max_in_flight,
                                               uint32_t* sink) {
  const char* src = data + blockIdx.x * num_stages * STAGE_BYTES;
  const uint32_t warp = threadIdx.x / 32;
  if constexpr (distmk::BULK_COPIES) {
    extern __shared__ __align__(128) char stages[];
    __shared__ Barriers barriers;
    if (threadIdx.x == 0) {
      for (uint32_t s = 0; s < NUM_STAGES; ++s) {
        distmk::barrier_init(&barriers.full[s], 1);
        distmk::barrier_init(&barriers.empty[s], 1);
      }
      distmk::barrier_init_done();
    }
    __syncthreads();
    if (threadIdx.x % 32) return;
    if (warp == NUM_DRAINERS)
      load(src, num_stages, max_in_flight, barriers, stages);
    else
      drain(warp, num_stages, barriers);
  } else {
    if (warp == NUM_DRAINERS) return;
    const uint32_t seen = read(src, num_stages);
    if (seen == max_in_flight) *sink = seen;  // never true, but the compiler must keep the loads
  }
}
