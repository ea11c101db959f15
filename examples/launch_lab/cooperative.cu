// Rung 7: a persistent kernel with a grid barrier between the phases, so that a block may read what another block
// wrote. In every phase, a block processes the part that its neighbour processed before: without grid.sync(), results
// are wrong.
//
// A grid barrier needs all blocks to be resident at once. A cooperative launch makes them so, or fails. On GPUs without
// cooperative launch, a launch runs one phase (`last` is `first` + 1), and the host waits between launches.
#include <cooperative_groups.h>

#include "lab.cuh"

extern "C" __global__ void chain_cooperative(float* x, uint32_t num, uint32_t first, uint32_t last, Stamp* stamps) {
  const uint32_t part = (num + gridDim.x - 1) / gridDim.x;
  for (uint32_t phase = first; phase < last; ++phase) {
    if (phase > first) cooperative_groups::this_grid().sync();
    Stamp* stamp = stamps ? stamps + phase : nullptr;
    stamp_begin(stamp);
    const uint32_t begin = min((blockIdx.x + phase) % gridDim.x * part, num), end = min(begin + part, num);
    for (uint32_t i = begin + threadIdx.x; i < end; i += blockDim.x) x[i] = sines(x[i]);
    stamp_end(stamp);
  }
}
