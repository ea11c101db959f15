// The root mean square by which RMSNorm divides a row, or a head of it (Zhang and Sennrich, arXiv:1910.07467).
#pragma once
#include "runtime/math.h"

namespace distmk {

// 1 / rms of `n` numbers with this sum of squares.
DISTMK_FN float over_rms(float squares, uint32_t n, float eps) {
  return inverse_root(quotient(squares, static_cast<float>(n)) + eps);
}

}  // namespace distmk
