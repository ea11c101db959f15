// Element-wise functions in the epilogues of linear layers. T and `Math`: see math.h.
//
// A gated epilogue computes activation(gate) * up: one column of the output from two rows of the weight (GLU variants:
// Shazeer, arXiv:2002.05202). Both activations have the form x / (1 + e^-z).
//   SWIGLU  SiLU: z = x
//   GEGLU   GELU in its tanh approximation, x (1 + tanh(z / 2)) / 2: z = 2 sqrt(2 / pi) (x + 0.044715 x^3)
#pragma once
#include "abi.h"
#include "runtime/math.h"

namespace distmk {

// Cases of a switch, one for each gated epilogue.
#define DISTMK_GATED_CASE(NAME) case Epilogue::NAME:
#define DISTMK_GATED_CASES DISTMK_GATED_EPILOGUES(DISTMK_GATED_CASE)

DISTMK_FN constexpr bool is_gated(Epilogue epilogue) {
#define DISTMK_OR_IS(NAME) || epilogue == Epilogue::NAME
  return false DISTMK_GATED_EPILOGUES(DISTMK_OR_IS);
#undef DISTMK_OR_IS
}

// z of GELU.
template <class T>
DISTMK_FN T gelu_exponent(T x) {
  return x * (x * x * 0.0713548163f + 1.59576912f);
}
// The gated product for an activation whose exponent is z.
template <class Math, class T>
DISTMK_FN T gated_by(T gate, T z, T up) {
  return Math::quotient(gate, 1.0f + Math::exp(-z)) * up;
}
// activation(gate) * up.
template <class Math, class T>
DISTMK_FN T gated(Epilogue epilogue, const T& gate, const T& up) {
  return epilogue == Epilogue::GEGLU ? gated_by<Math>(gate, gelu_exponent(gate), up) : gated_by<Math>(gate, gate, up);
}

// cap * tanh(logit / cap), by tanh(x) = 1 - 2 / (1 + e^2x). A cap of 0 leaves the logit unchanged.
template <class Math, class T>
DISTMK_FN T softcapped(T logit, float cap) {
  if (cap == 0.0f) return logit;
  return cap - Math::quotient(2.0f * cap, 1.0f + Math::exp(Math::quotient(2.0f * logit, cap)));
}

}  // namespace distmk
