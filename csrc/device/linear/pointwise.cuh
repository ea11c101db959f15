// What epilogues make of their values, one by one: gated activations (runtime/gated.h), logits within a limit.
#pragma once
#include "runtime/gated.h"

namespace distmk {
namespace linear {

// z: the activation's exponent.
DISTMK_FN float gated(float gate, float z, float up) { return __fdividef(gate, 1.0f + __expf(-z)) * up; }
DISTMK_FN float swiglu(float gate, float up) { return gated(gate, gate, up); }
DISTMK_FN float geglu(float gate, float up) { return gated(gate, gelu_exponent(gate), up); }

// cap * tanh(logit / cap), as tanh(x) = 1 - 2 / (1 + e^2x); a cap of 0: the logit.
DISTMK_FN float softcapped(float logit, float cap) {
  if (cap == 0.0f) return logit;
  return cap - __fdividef(2.0f * cap, 1.0f + __expf(__fdividef(2.0f * logit, cap)));
}

}  // namespace linear
}  // namespace distmk
