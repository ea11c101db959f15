// RoPE (Su et al., arXiv:2104.09864): elements i and i + head_dim / 2 of a head form a pair (a, b). The pair is rotated
// by an angle that grows with the position. T is float, or a vector of floats.
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
