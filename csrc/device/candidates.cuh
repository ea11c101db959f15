// Which token is sampled: the highest logit, of equal ones the lowest token.
#pragma once
#include "abi.h"
#include "device/platform.h"

namespace distmk {

DISTMK_FN Candidate better_of(const Candidate& a, const Candidate& b) {
  const bool second = b.token >= 0 && (a.token < 0 || b.value > a.value || (b.value == a.value && b.token < a.token));
  return second ? b : a;
}

// That of the lane `step` away.
DISTMK_FN Candidate exchanged(const Candidate& mine, uint32_t step) {
  return {__shfl_xor_sync(~0u, mine.value, step), __shfl_xor_sync(~0u, mine.token, step)};
}

}  // namespace distmk
