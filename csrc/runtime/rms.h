// RMSNorm's scale factor (Zhang and Sennrich, arXiv:1910.07467), for every body that normalizes a row or a head.
#pragma once
#include "runtime/math.h"

namespace distmk {

// 1 / rms of `n` numbers whose squares sum to `squares`.
DISTMK_FN float over_rms(float squares, uint32_t n, float eps) {
  return inverse_root(quotient(squares, static_cast<float>(n)) + eps);
}

}  // namespace distmk
