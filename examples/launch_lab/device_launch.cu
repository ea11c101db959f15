// Rung 5: one thread launches all kernels of the step, into its block's stream, where they run in order.
#include "chain.cu"

// `status`: receives the first launch error. The parent grid completes after all its children.
extern "C" __global__ void chain_parent(float* x, uint32_t num, uint32_t num_kernels, uint32_t num_blocks,
                                        uint32_t num_threads, Stamp* stamps, uint32_t* status) {
  if (threadIdx.x) return;
  for (uint32_t kernel = 0; kernel < num_kernels; ++kernel) {
    chain_kernel<<<num_blocks, num_threads>>>(x, num, stamps ? stamps + kernel : nullptr);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) {
      *status = error;
      return;
    }
  }
}
