// Log-sum-exp combine of partials that lie in the lanes of a warp, a partial a lane (runtime/log_sum_exp.h has the
// arithmetic): butterfly reductions of their maxima and sums.
#pragma once
#include "runtime/log_sum_exp.h"

namespace distmk {
namespace attention {

// Over each aligned group of LANES lanes; all of them get the result.
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

// w_j of the partial that a lane has, of those of each aligned group of LANES lanes.
template <uint32_t LANES>
DISTMK_FN float lane_weight(float max) {
  return combine_weight(max, lanes_max<LANES>(max));
}

// Over all 32 lanes, distant ones first: another order of additions than lanes_sum<32>, and so other last bits.
DISTMK_FN float warp_sum(float value) {
  for (uint32_t step = 16; step; step >>= 1) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

}  // namespace attention
}  // namespace distmk
