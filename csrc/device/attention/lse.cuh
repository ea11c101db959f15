// Reductions for the log-sum-exp combine of partials that lie in a warp's lanes, one partial per lane: butterflies over
// their maxima and sums. runtime/log_sum_exp.h has the arithmetic.
#pragma once
#include "runtime/log_sum_exp.h"

namespace distmk {
namespace attention {

// Reduces over each aligned group of LANES lanes. All lanes get the result.
template <uint32_t LANES>
DISTMK_FN float lanes_max(float value) {
  for (uint32_t step = 1; step < LANES; step <<= 1) value = fmaxf(value, __shfl_xor_sync(~0u, value, step));
  return value;
}
template <uint32_t LANES>
DISTMK_FN float lanes_sum(float value) {
  for (uint32_t step = 1; step < LANES; step <<= 1) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

// w_j of this lane's partial, among the partials of its aligned group of LANES lanes.
template <uint32_t LANES>
DISTMK_FN float lane_weight(float max) {
  return combine_weight(max, lanes_max<LANES>(max));
}

// Sum over all 32 lanes, distant ones first. That is another order of additions than in lanes_sum<32>, so the last bits
// differ.
DISTMK_FN float warp_sum(float value) {
  for (uint32_t step = 16; step; step >>= 1) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

}  // namespace attention
}  // namespace distmk
