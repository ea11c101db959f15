// Greedy sampling takes the token of the largest logit; among equal logits, the smallest token id.
#pragma once
#include "abi.h"
#include "platform/platform.h"

namespace distmk {

// A candidate with a negative token id is none.
DISTMK_FN Candidate better_of(const Candidate& a, const Candidate& b) {
  const bool second = b.token >= 0 && (a.token < 0 || b.value > a.value || (b.value == a.value && b.token < a.token));
  return second ? b : a;
}

}  // namespace distmk
