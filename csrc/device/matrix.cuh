// Numbers as tensor cores take them.
#pragma once
#include "device/platform.h"

namespace distmk {

DISTMK_FN uint32_t pack_bf16(float a, float b) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Element by element: the compiler would load `{}` from memory.
DISTMK_FN uint4 eight_zeros() {
  uint4 v;
  v.x = v.y = v.z = v.w = 0;
  return v;
}

// What rounding to bf16 leaves of a number, itself rounded: two bf16 say a float to within its last few bits.
DISTMK_FN float low_half(float v) { return v - __bfloat162float(__float2bfloat16_rn(v)); }

}  // namespace distmk
