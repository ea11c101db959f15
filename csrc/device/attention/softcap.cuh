// Capped scores (Gemma 2, arXiv:2408.00118).
#pragma once
#include "runtime/log_sum_exp.h"

namespace distmk {
namespace attention {

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// cap * tanh(score / cap) of a score that is scaled by log2(e), as is the result.
DISTMK_FN float capped(float score, float cap) {
  const float power = Base2::exp(-2.0f * fabsf(score) * normalizer(cap));
  return copysignf(cap * LOG2_E * (1.0f - power) * normalizer(1.0f + power), score);
}

}  // namespace attention
}  // namespace distmk
