// RoPE (Su et al., arXiv:2104.09864): elements i and i + head_dim / 2 of a head are a pair (a, b), which its position
// rotates. T: float, or a vector of floats.
#pragma once
#include "platform/platform.h"

namespace distmk {

template <class T>
DISTMK_FN T rotated_first(T a, T b, T cosine, T sine) {
  return a * cosine - b * sine;
}
template <class T>
DISTMK_FN T rotated_second(T a, T b, T cosine, T sine) {
  return b * cosine + a * sine;
}

}  // namespace distmk
