// SIMD for the host's task bodies: compiler vector types, so that one source serves AVX-512, AVX2, NEON and plain SSE;
// conversions between bf16 and float32; scratch memory.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Whether one instruction multiplies pairs of bf16 and adds both products to a float32.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512BF16__)
#define DISTMK_BF16_PRODUCTS 1
#else
#define DISTMK_BF16_PRODUCTS 0
#endif

namespace distmk::simd {

#if DISTMK_BF16_PRODUCTS
constexpr uint32_t LANES = 16;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr uint32_t LANES = 8;
#else
constexpr uint32_t LANES = 4;
#endif
constexpr uint32_t BLOCK = 2 * LANES;  // bf16 elements of one vector register

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

#define DISTMK_INLINE inline __attribute__((always_inline))

DISTMK_INLINE Vec load(const float* p) {
  Vec v;
  memcpy(&v, p, sizeof v);
  return v;
}
DISTMK_INLINE void store(float* p, Vec v) { memcpy(p, &v, sizeof v); }
DISTMK_INLINE Vec splat(float value) { return value - Vec{}; }

// sum + a * b, rounded once (fused multiply-add). Depending on the processor it tunes for, the compiler would fuse it
// in one loop and not in another. Results would then depend on the loop that computed them.
DISTMK_INLINE Vec add_product(Vec sum, Vec a, Vec b) {
#if DISTMK_BF16_PRODUCTS
  return _mm512_fmadd_ps(a, b, sum);
#elif defined(__AVX2__) && defined(__FMA__)
  return _mm256_fmadd_ps(a, b, sum);
#elif defined(__aarch64__)
  return vfmaq_f32(sum, a, b);
#else
  return sum + a * b;
#endif
}

// A block of bf16 read as 32-bit words: even elements are the low halves, odd elements the high halves, and one
// instruction converts either to float32. So float32 operands of a block are stored with the even elements first
// (split_block()).
DISTMK_INLINE Bits load_block(const uint16_t* p) {
  Bits v;
  memcpy(&v, p, sizeof v);
  return v;
}
DISTMK_INLINE Vec even_of(Bits v) { return reinterpret_cast<Vec>(v << 16); }
DISTMK_INLINE Vec odd_of(Bits v) { return reinterpret_cast<Vec>(v & 0xffff0000u); }

template <size_t... I>
DISTMK_INLINE void split_block(Vec a, Vec b, Vec* even, Vec* odd, std::index_sequence<I...>) {
  *even = __builtin_shufflevector(a, b, (2 * I)...);
  *odd = __builtin_shufflevector(a, b, (2 * I + 1)...);
}
// Stores BLOCK floats, the even elements first; join_block() is the inverse.
DISTMK_INLINE void split_block(float* out, Vec a, Vec b) {
  Vec even, odd;
  split_block(a, b, &even, &odd, std::make_index_sequence<LANES>{});
  store(out, even);
  store(out + LANES, odd);
}
inline void join_block(float* block) {
  float joined[BLOCK];
  for (uint32_t i = 0; i < BLOCK; ++i) joined[i] = block[i % 2 * LANES + i / 2];
  memcpy(block, joined, sizeof joined);
}

DISTMK_INLINE Vec max_of(Vec a, Vec b) { return a > b ? a : b; }
DISTMK_INLINE Vec min_of(Vec a, Vec b) { return a < b ? a : b; }

// Joins all lanes, distant ones first.
template <uint32_t N, class V, class Join, size_t... I>
DISTMK_INLINE float reduced(V v, const Join& join, std::index_sequence<I...>) {
  const auto half = join(__builtin_shufflevector(v, v, I...), __builtin_shufflevector(v, v, (N / 2 + I)...));
  if constexpr (N > 8)
    return reduced<N / 2>(half, join, std::make_index_sequence<N / 4>{});
  else if constexpr (N == 8)
    return join(join(half[0], half[2]), join(half[1], half[3]));
  else
    return join(half[0], half[1]);
}
template <class Join>
DISTMK_INLINE float reduced(Vec v, const Join& join) {
  return reduced<LANES>(v, join, std::make_index_sequence<LANES / 2>{});
}
DISTMK_INLINE float sum_of(Vec v) {
  return reduced(v, [](auto a, auto b) { return a + b; });
}
DISTMK_INLINE float max_of(Vec v) {
  return reduced(v, [](auto a, auto b) { return a > b ? a : b; });
}

// e^x for x up to 88, with a relative error of about 1e-7. It takes x = n ln 2 + r, a polynomial in r, and adds n to
// the exponent. The result is zero below -87 and for -inf.
DISTMK_INLINE Vec exp_of(Vec x) {
#if DISTMK_BF16_PRODUCTS
  // All lanes are in the masks: intrinsics without a mask begin with an undefined register, and the compiler warns.
  const Vec bounded = x;
  const Vec n = _mm512_maskz_roundscale_ps(0xffff, bounded * 1.44269504f, _MM_FROUND_TO_NEAREST_INT);
#else
  constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const Vec bounded = max_of(x, splat(-87.0f)), shifted = bounded * 1.44269504f + ROUND;
  const Vec n = shifted - ROUND;
#endif
  const Vec r = add_product(add_product(bounded, n, splat(-0.693359375f)), n, splat(2.12194440e-4f));
  Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
#if DISTMK_BF16_PRODUCTS
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, splat(-87.0f), _CMP_NLT_UQ), p, n);
#else
  const Ints exponent = reinterpret_cast<Ints>(shifted) << 23;
  const Vec result = reinterpret_cast<Vec>(reinterpret_cast<Ints>(p) + exponent);
  return x < -87.0f ? Vec{} : result;
#endif
}

// The functions of a Vec that the formulas of runtime/math.h need.
struct VectorMath {
  static constexpr float LOG_E = 1.0f;
  static Vec exp(Vec x) { return exp_of(min_of(x, splat(88.0f))); }
  template <class A>
  static Vec quotient(A a, Vec b) {
    return a / b;
  }
  static Vec quotient(Vec a, float b) { return a * (1.0f / b); }
  static Vec inverse(Vec x) { return 1.0f / x; }
  static Vec magnitude(Vec x) { return x < 0.0f ? -x : x; }
  static Vec with_sign(Vec x, Vec sign) { return sign < 0.0f ? -x : x; }
};

inline float from_bf16(uint16_t value) {
  const uint32_t bits = uint32_t{value} << 16;
  float out;
  memcpy(&out, &bits, sizeof out);
  return out;
}
// Rounds to nearest, ties to even; a NaN stays a NaN.
inline uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}
// Rounds LANES elements in the same way.
DISTMK_INLINE Halves to_bf16(Vec v) {
  const Bits bits = reinterpret_cast<Bits>(v);
  const Bits rounded = bits + 0x7fffu + (bits >> 16 & 1u);
  const Bits chosen = (bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x400000u : rounded;
  return __builtin_convertvector(chosen >> 16, Halves);
}
// Rounds operands of products. Where one instruction rounds, subnormal numbers become zero.
DISTMK_INLINE Halves operand_to_bf16(Vec v) {
#if DISTMK_BF16_PRODUCTS
  return (Halves)_mm512_cvtneps_pbh(v);
#else
  return to_bf16(v);
#endif
}
DISTMK_INLINE Vec from_bf16(Halves v) { return reinterpret_cast<Vec>(__builtin_convertvector(v, Bits) << 16); }
DISTMK_INLINE void store(uint16_t* p, Halves v) { memcpy(p, &v, sizeof v); }

inline void to_bf16(uint16_t* out, const float* x, uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) out[i] = to_bf16(x[i]);
}
inline void from_bf16(float* out, const uint16_t* x, uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) out[i] = from_bf16(x[i]);
}
// Splits N floats into `num_parts` bf16 operands of products, `stride` apart: the nearest bf16, then the nearest bf16
// of the remainder, and so on. A number that is not finite leaves no remainder.
template <uint32_t N>
void split_bf16(const float* x, uint32_t num_parts, uint16_t* out, uint32_t stride) {
  for (uint32_t i = 0; i < N; i += LANES) {
    Vec left = load(x + i);
    for (uint32_t part = 0; part < num_parts; ++part) {
      const Halves nearest = operand_to_bf16(left);
      store(out + part * stride + i, nearest);
      const Vec taken = from_bf16(nearest);
      left = VectorMath::magnitude(taken) < INFINITY ? left - taken : Vec{};
    }
  }
}
// Zeros `num_cols` columns of each row (float or bf16). Does nothing if `out` is null.
template <class T>
void clear(T* out, uint32_t num_rows, uint64_t stride, uint32_t num_cols) {
  for (uint32_t row = 0; out && row < num_rows; ++row) memset(out + row * stride, 0, num_cols * sizeof(T));
}

// Sum of squares, for RMSNorm.
inline float sum_squares(const float* x, uint32_t n) {
  Vec sums[4] = {};
  uint32_t i = 0;
  for (; i + 4 * LANES <= n; i += 4 * LANES)
    for (uint32_t j = 0; j < 4; ++j) {
      const Vec v = load(x + i + j * LANES);
      sums[j] += v * v;
    }
  float total = sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < n; ++i) total += x[i] * x[i];
  return total;
}

typedef uint32_t Words __attribute__((vector_size(64)));

// Swaps the off-diagonal quarters of each square of 2 D x 2 D words.
template <uint32_t D, uint32_t... J>
DISTMK_INLINE void swap_quarters(Words (&rows)[16], std::integer_sequence<uint32_t, J...>) {
  for (uint32_t i = 0; i < 16; ++i) {
    if (i & D) continue;
    const Words top = rows[i], bottom = rows[i + D];
    rows[i] = __builtin_shufflevector(top, bottom, (J & D ? 16 + J - D : J)...);
    rows[i + D] = __builtin_shufflevector(top, bottom, (J & D ? 16 + J : J + D)...);
  }
}

// Transposes a matrix of 16 x 16 words.
DISTMK_INLINE void transpose(Words (&rows)[16]) {
  const auto all = std::make_integer_sequence<uint32_t, 16>{};
  swap_quarters<1>(rows, all);
  swap_quarters<2>(rows, all);
  swap_quarters<4>(rows, all);
  swap_quarters<8>(rows, all);
}

// Memory of the calling thread for one purpose (`Tag`), aligned to a cache line. It grows to the largest size requested
// so far, so a steady state allocates nothing. Growing discards its contents.
template <class Tag>
float* scratch(uint64_t num_floats) {
  struct Free {
    void operator()(float* p) const { free(p); }
  };
  thread_local std::unique_ptr<float, Free> memory;
  thread_local uint64_t capacity = 0;
  if (num_floats > capacity) {
    capacity = (num_floats + 15) / 16 * 16;
    memory.reset(static_cast<float*>(aligned_alloc(64, capacity * sizeof(float))));
    if (!memory) abort();
  }
  return memory.get();
}

}  // namespace distmk::simd
