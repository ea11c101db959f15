// Vectors of the bodies of wide iterations: with AVX-512 of 16 lanes, else those of host/simd.h. Narrow bodies, which
// memory bounds, keep to the latter.
#pragma once
#include "host/simd.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512BF16__)
#include <immintrin.h>
#define DISTMK_BF16_PRODUCTS 1
#else
#define DISTMK_BF16_PRODUCTS 0
#endif

namespace distmk::wide {

#if DISTMK_BF16_PRODUCTS
constexpr uint32_t LANES = 16;
#else
constexpr uint32_t LANES = simd::LANES;
#endif

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

DISTMK_INLINE Vec load(const float* p) {
  Vec v;
  memcpy(&v, p, sizeof v);
  return v;
}
DISTMK_INLINE void store(float* p, Vec v) { memcpy(p, &v, sizeof v); }

// LANES elements to and from bf16, rounded as simd::to_bf16() does.
DISTMK_INLINE Vec from_bf16(const uint16_t* p) {
  Halves halves;
  memcpy(&halves, p, sizeof halves);
  return reinterpret_cast<Vec>(__builtin_convertvector(halves, Bits) << 16);
}
DISTMK_INLINE void to_bf16(uint16_t* p, Vec v) {
  const Bits bits = reinterpret_cast<Bits>(v);
  const Bits rounded = bits + 0x7fffu + (bits >> 16 & 1u);
  const Bits chosen = (bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x400000u : rounded;
  const Halves halves = __builtin_convertvector(chosen >> 16, Halves);
  memcpy(p, &halves, sizeof halves);
}

DISTMK_INLINE Vec min_of(Vec a, Vec b) { return a < b ? a : b; }

#if DISTMK_BF16_PRODUCTS
template <uint32_t HALF>
DISTMK_INLINE simd::Vec half_of(Vec v) {
  simd::Vec half;
  memcpy(&half, reinterpret_cast<const char*>(&v) + HALF * sizeof half, sizeof half);
  return half;
}
DISTMK_INLINE Vec add_product(Vec sum, Vec a, Vec b) { return _mm512_fmadd_ps(a, b, sum); }
DISTMK_INLINE Vec max_of(Vec a, Vec b) { return a > b ? a : b; }
DISTMK_INLINE float max_of(Vec v) { return simd::max_of(simd::max_of(half_of<0>(v), half_of<1>(v))); }
DISTMK_INLINE float sum_of(Vec v) { return simd::sum_of(half_of<0>(v) + half_of<1>(v)); }
// As simd::exp_of(), of numbers that are not above 88. Masks of all lanes: the intrinsics without a mask begin with an
// undefined register, of which the compiler warns.
DISTMK_INLINE Vec exp_of(Vec x) {
  const Vec n = _mm512_maskz_roundscale_ps(0xffff, x * 1.44269504f, _MM_FROUND_TO_NEAREST_INT);
  const Vec r = add_product(add_product(x, n, Vec{} - 0.693359375f), n, Vec{} + 2.12194440e-4f);
  Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, Vec{} - 87.0f, _CMP_NLT_UQ), p, n);
}
#else
using simd::add_product;
using simd::exp_of;
using simd::max_of;
using simd::sum_of;
#endif

}  // namespace distmk::wide
