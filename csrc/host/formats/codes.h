// Vectors of the codes that weight formats store: bytes, and float16.
#pragma once
#include "host/simd.h"

namespace distmk::simd {

typedef uint8_t Bytes __attribute__((vector_size(LANES)));
DISTMK_INLINE Bytes load_bytes(const uint8_t* p) {
  Bytes v;
  memcpy(&v, p, sizeof v);
  return v;
}
typedef int8_t SignedBytes __attribute__((vector_size(LANES)));
// LANES bytes as numbers of 16 bits.
typedef int16_t Shorts __attribute__((vector_size(2 * LANES)));
DISTMK_INLINE Shorts load_shorts(const uint8_t* p) {
#if !DISTMK_BF16_PRODUCTS && defined(__AVX2__) && defined(__FMA__)
  return (Shorts)_mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  return __builtin_convertvector(load_bytes(p), Shorts);
#endif
}
// LANES bytes as numbers of 32 bits, on which shifts are one instruction; of bytes they are not.
DISTMK_INLINE Ints load_ints(const uint8_t* p) {
#if !DISTMK_BF16_PRODUCTS && defined(__AVX2__) && defined(__FMA__)
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  return __builtin_convertvector(load_bytes(p), Ints);
#endif
}
DISTMK_INLINE Ints load_signed_ints(const uint8_t* p) {
#if !DISTMK_BF16_PRODUCTS && defined(__AVX2__) && defined(__FMA__)
  return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  return __builtin_convertvector((SignedBytes)load_bytes(p), Ints);
#endif
}
DISTMK_INLINE Vec to_floats(Ints v) { return __builtin_convertvector(v, Vec); }

// float16 to float32, of finite numbers.
DISTMK_INLINE Vec from_f16(Halves v) {
#if DISTMK_BF16_PRODUCTS
  return (Vec)_mm512_maskz_cvtph_ps(0xffff, (__m256i)v);
#elif defined(__F16C__) && defined(__AVX2__) && defined(__FMA__)
  return (Vec)_mm256_cvtph_ps((__m128i)v);
#else
  const Bits bits = __builtin_convertvector(v, Bits);
  return reinterpret_cast<Vec>((bits & 0x7fffu) << 13) * 0x1p112f * (bits & 0x8000u ? splat(-1.0f) : splat(1.0f));
#endif
}
inline float from_f16(uint16_t value) { return from_f16(Halves{} + value)[0]; }

}  // namespace distmk::simd
