// Products of a warpgroup that run beside the threads (platform/wgmma.cuh). A GPU reads their operands in shared memory
// and adds to their accumulators at any time from their start until their group is awaited. Here some groups are
// multiplied at once, so that operands that have not arrived are found, and the others as late as they may be, so that
// those that are overwritten too soon are.
#pragma once
#include "emulator/fibers.h"

namespace distmk {
namespace emulator {

// The same for all lanes of a warp, which multiply together.
inline bool is_late(const Fiber& thread) {
  const uint64_t draw =
      (thread.products.num_committed() * 64 + thread.thread / WARP + thread.block->index) * 0x9e3779b97f4a7c15;
  return draw >> 63;
}

// `multiply`: the product, by values of its registers.
template <class Multiply>
void start_product(const Multiply& multiply) {
  Fiber& thread = current();
  if (!is_late(thread)) return multiply();
  const Unwatched here;
  thread.products.start(multiply);
}

inline void commit_products() { current().products.commit(); }

// Multiplies all groups but the last `pending`.
inline void await_products(uint64_t pending) {
  current().products.await(pending, [](const std::function<void()>& multiply) { multiply(); });
}

}  // namespace emulator
}  // namespace distmk
