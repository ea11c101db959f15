// Argmax over the lanes of a warp, for the head's epilogue and the sample task.
#pragma once
#include "runtime/argmax.h"

namespace distmk {

// The best candidate of all lanes. Every lane gets it.
DISTMK_FN Candidate warp_argmax(Candidate best) {
  for (uint32_t step = 16; step; step >>= 1)
    best = better_of(best, {__shfl_xor_sync(~0u, best.value, step), __shfl_xor_sync(~0u, best.token, step)});
  return best;
}

}  // namespace distmk
