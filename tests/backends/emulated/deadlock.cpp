// Kernels whose threads wait for each other, diverge at a collective instruction, or arrive too often at a barrier
// (test_emulator.py).
#include <cuda_runtime.h>

#include <string>

#include "emulator/ptx.h"

namespace {

constexpr uint32_t NUM_THREADS = 4 * 32, BARRIER_OFFSET = 64;

// Each warp waits for something else, except the last, which leaves.
void deadlock() {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  auto* barrier = distmk::at_shared<uint64_t>(BARRIER_OFFSET);
  if (threadIdx.x == 0) distmk::barrier_init(barrier, 1);
  __syncthreads();
  if (warp == 0) __syncthreads();
  if (warp == 1) distmk::barrier_wait(barrier, 0);
  if (warp == 2 && lane < 16) __all_sync(~0u, true);
}

void diverge() {
  if (threadIdx.x % 32)
    __syncwarp();
  else
    __shfl_sync(~0u, 1u, 0);
}

void arrive() {
  auto* barrier = distmk::at_shared<uint64_t>(BARRIER_OFFSET);
  if (threadIdx.x) return;
  distmk::barrier_init(barrier, 3);
  distmk::barrier_arrive(barrier, 2);
  distmk::barrier_arrive(barrier, 2);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string kernel = argc > 1 ? argv[1] : "";
  distmk::emulator::run_grid(1, NUM_THREADS, 1024, 1,
                             kernel == "diverge"  ? diverge
                             : kernel == "arrive" ? arrive
                                                  : deadlock);
  return 0;
}
