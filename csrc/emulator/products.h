// Products of a warpgroup that run beside its threads (platform/wgmma.cuh). From a product's start until its group is
// awaited, a GPU reads operands in shared memory and adds to accumulators at any time. The emulator multiplies some
// groups at once, which finds operands that have not arrived. It multiplies the others as late as possible, which finds
// operands that are overwritten too soon.
#pragma once
#include "emulator/fibers.h"

namespace distmk {
namespace emulator {

// Whether a group is multiplied late. All lanes of a warp multiply together, so they get the same answer.
inline bool is_late(const Fiber& thread) {
  const uint64_t draw =
      (thread.products.num_committed() * 64 + thread.thread / WARP + thread.block->index) * 0x9e3779b97f4a7c15;
  return draw >> 63;
}

// `multiply` computes the product, with its registers' values at the start.
template <class Multiply>
void start_product(const Multiply& multiply) {
  Fiber& thread = current();
  if (!is_late(thread)) return multiply();
  const Unwatched here;
  thread.products.start(multiply);
}

inline void commit_products() { current().products.commit(); }

// Multiplies all groups except the last `pending`.
inline void await_products(uint64_t pending) {
  current().products.await(pending, [](const std::function<void()>& multiply) { multiply(); });
}

}  // namespace emulator
}  // namespace distmk
