// CUDA's bfloat16, for the emulator.
#pragma once
#include <cuda_runtime.h>

struct __nv_bfloat16 {
  uint16_t bits;
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline __nv_bfloat16 __float2bfloat16_rn(float v) {
  uint32_t bits;
  memcpy(&bits, &v, 4);
  if (v != v) return {static_cast<uint16_t>(bits >> 16 | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 v) { return v.bits; }
inline float __bfloat162float(__nv_bfloat16 v) { return __uint_as_float(static_cast<uint32_t>(v.bits) << 16); }
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) {
  return {__float2bfloat16_rn(a), __float2bfloat16_rn(b)};
}
