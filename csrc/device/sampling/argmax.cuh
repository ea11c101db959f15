// Candidates for the next token among the lanes of a warp.
#pragma once
#include "runtime/argmax.h"

namespace distmk {

// That of the lane `step` away.
DISTMK_FN Candidate exchanged(const Candidate& mine, uint32_t step) {
  return {__shfl_xor_sync(~0u, mine.value, step), __shfl_xor_sync(~0u, mine.token, step)};
}

}  // namespace distmk
