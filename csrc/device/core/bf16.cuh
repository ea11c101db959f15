// Packs float32 into bf16 operands for tensor cores, for all bodies that multiply.
#pragma once
#include "platform/device.h"

namespace distmk {

DISTMK_FN uint32_t pack_bf16(float a, float b) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// The halves of a pair of bf16 numbers.
DISTMK_FN float low_of_pair(uint32_t pair) { return __uint_as_float(pair << 16); }
DISTMK_FN float high_of_pair(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// Set element by element, because the compiler would load `{}` from memory.
DISTMK_FN uint4 zero_chunk() {
  uint4 v;
  v.x = v.y = v.z = v.w = 0;
  return v;
}

// Splits a pair of floats into bf16 (high) and the bf16 of its rounding error (low). Their sum has about 16 bits of
// mantissa.
struct Halves {
  uint32_t high, low;

  DISTMK_FN Halves(float a, float b)
      : high(pack_bf16(a, b)), low(pack_bf16(a - low_of_pair(high), b - high_of_pair(high))) {}
};

}  // namespace distmk
