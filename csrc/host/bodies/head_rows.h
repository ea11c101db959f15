// What attention does with a head of a row before it is stored or multiplied, and with scores before their softmax.
#pragma once
#include <cmath>

#include "host/simd.h"

namespace distmk {

inline void rms_norm(float* x, const float* weight, float eps, uint32_t n) {
  const float scale = 1.0f / std::sqrt(simd::sum_squares(x, n) / static_cast<float>(n) + eps);
  for (uint32_t i = 0; i < n; ++i) x[i] = x[i] * scale * weight[i];
}

// RoPE; pairs are (i, i + n / 2), and `table` holds n / 2 cosines, then n / 2 sines.
inline void apply_rope(float* __restrict x, const float* __restrict table, uint32_t n) {
  const uint32_t half = n / 2;
  for (uint32_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = a * table[i] - b * table[i + half];
    x[i + half] = b * table[i] + a * table[i + half];
  }
}

// cap * tanh(score / cap) of a vector of scores; `exp`: of such a vector.
template <class Vec, class Exp>
DISTMK_INLINE Vec capped(Vec score, float cap, const Exp& exp) {
  const Vec magnitude = score < 0.0f ? -score : score, power = exp(magnitude * (-2.0f / cap));
  const Vec result = (1.0f - power) / (1.0f + power) * cap;
  return score < 0.0f ? -result : result;
}

}  // namespace distmk
