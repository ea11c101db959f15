// The gated epilogues of linear layers: activation(gate) * up, a column of the output from two rows of the weight
// (GLU variants: Shazeer, arXiv:2002.05202). Both activations are x / (1 + e^-z).
//   SWIGLU  SiLU: z = x
//   GEGLU   GELU in its tanh approximation, x (1 + tanh(z / 2)) / 2: z = 2 sqrt(2 / pi) (x + 0.044715 x^3)
#pragma once
#include "abi.h"
#include "platform/platform.h"

namespace distmk {

DISTMK_FN constexpr bool is_gated(Epilogue e) { return e == Epilogue::SWIGLU || e == Epilogue::GEGLU; }

// z of GELU; T: float, or a vector of floats.
template <class T>
DISTMK_FN T gelu_exponent(T x) {
  return x * (x * x * 0.0713548163f + 1.59576912f);
}

}  // namespace distmk
