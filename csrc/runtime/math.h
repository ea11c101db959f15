// Arithmetic on float and on vectors of floats (host/simd.h) behind one interface, so that each formula is written
// once. `Math` has the functions of a type T; on a GPU these are the fast approximations.
#pragma once
#include <cmath>

#include "platform/platform.h"

namespace distmk {

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

DISTMK_FN float quotient(float a, float b) {
#ifdef DISTMK_GPU
  return __fdividef(a, b);
#else
  return a / b;
#endif
}

DISTMK_FN float inverse_root(float x) {
#ifdef DISTMK_GPU
  return rsqrtf(x);
#else
  return 1.0f / std::sqrt(x);
#endif
}

struct FloatMath {
  DISTMK_FN static float quotient(float a, float b) { return distmk::quotient(a, b); }
  DISTMK_FN static float inverse(float x) { return distmk::quotient(1.0f, x); }
  DISTMK_FN static float magnitude(float x) { return fabsf(x); }
  DISTMK_FN static float with_sign(float x, float sign) { return copysignf(x, sign); }
};

// The exponential of a softmax. Base 2 saves a multiplication per score if the queries are scaled by log2(e).
struct Base2 : FloatMath {
  static constexpr float LOG_E = LOG2_E;
  DISTMK_FN static float exp(float x) { return exp2f(x); }
};
struct BaseE : FloatMath {
  static constexpr float LOG_E = 1.0f;
  DISTMK_FN static float exp(float x) {
#ifdef DISTMK_GPU
    return __expf(x);
#else
    return std::exp(x);
#endif
  }
};

}  // namespace distmk
