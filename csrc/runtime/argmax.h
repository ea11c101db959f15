// Which token is sampled: the highest logit, of equal ones the lowest token.
#pragma once
#include "abi.h"
#include "platform/platform.h"

namespace distmk {

DISTMK_FN Candidate better_of(const Candidate& a, const Candidate& b) {
  const bool second = b.token >= 0 && (a.token < 0 || b.value > a.value || (b.value == a.value && b.token < a.token));
  return second ? b : a;
}

}  // namespace distmk
