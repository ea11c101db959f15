// Packs float32 into bf16 operands for tensor cores, for all bodies that multiply.
#pragma once
#include "platform/device.h"

namespace distmk {

DISTMK_FN uint32_t pack_bf16(float a, float b) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

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
      : high(pack_bf16(a, b)),
        low(pack_bf16(a - __uint_as_float(high << 16), b - __uint_as_float(high & 0xffff0000u))) {}
};

}  // namespace distmk
