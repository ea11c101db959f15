// What epilogues of linear layers make of their values, one by one. T and `Math`: see math.h.
//
// Gated epilogues are activation(gate) * up, a column of the output from two rows of the weight (GLU variants: Shazeer,
// arXiv:2002.05202). Both activations are x / (1 + e^-z).
//   SWIGLU  SiLU: z = x
//   GEGLU   GELU in its tanh approximation, x (1 + tanh(z / 2)) / 2: z = 2 sqrt(2 / pi) (x + 0.044715 x^3)
#pragma once
#include "abi.h"
#include "runtime/math.h"

namespace distmk {

DISTMK_FN constexpr bool is_gated(Epilogue e) { return e == Epilogue::SWIGLU || e == Epilogue::GEGLU; }

// z of GELU.
template <class T>
DISTMK_FN T gelu_exponent(T x) {
  return x * (x * x * 0.0713548163f + 1.59576912f);
}
// z: the activation's exponent.
template <class Math, class T>
DISTMK_FN T gated(T gate, T z, T up) {
  return Math::quotient(gate, 1.0f + Math::exp(-z)) * up;
}
template <class Math, class T>
DISTMK_FN T swiglu(T gate, T up) {
  return gated<Math>(gate, gate, up);
}
template <class Math, class T>
DISTMK_FN T geglu(T gate, T up) {
  return gated<Math>(gate, gelu_exponent(gate), up);
}

// cap * tanh(logit / cap), as tanh(x) = 1 - 2 / (1 + e^2x); a cap of 0: the logit.
template <class Math, class T>
DISTMK_FN T softcapped(T logit, float cap) {
  if (cap == 0.0f) return logit;
  return cap - Math::quotient(2.0f * cap, 1.0f + Math::exp(Math::quotient(2.0f * logit, cap)));
}

}  // namespace distmk
