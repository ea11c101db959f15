// Rung 7: a persistent kernel whose blocks meet between the phases, so that each may read what another one wrote: in
// every phase a block takes the part that its neighbour had in the last one. No grid.sync() means wrong results here.
//
// A cooperative launch holds all blocks on the GPU at once, or fails; only there can they wait for each other. Without
// it a launch does one phase (`last` is `first` + 1), and the host waits before it launches the next.
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
