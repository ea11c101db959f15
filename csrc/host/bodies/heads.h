// What attention does with a head of a row before it is stored or multiplied.
#pragma once
#include "host/bodies/rows.h"
#include "runtime/context.h"
#include "runtime/kv_cache.h"
#include "runtime/rope.h"

namespace distmk {

inline void widen(float* out, const float* x, uint32_t n) { memcpy(out, x, n * sizeof(float)); }
inline void widen(float* out, const uint16_t* x, uint32_t n) { simd::from_bf16(out, x, n); }

inline void round(uint16_t* out, const float* x, uint32_t n) { simd::to_bf16(out, x, n); }
inline void round(uint16_t* out, const uint16_t* x, uint32_t n) { memcpy(out, x, n * sizeof(uint16_t)); }

// `table`: `half` cosines, then as many sines.
inline void rotate(float* __restrict x, const float* __restrict table, uint32_t half) {
  for (uint32_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = rotated_first(a, b, table[i], table[i + half]);
    x[i + half] = rotated_second(a, b, table[i], table[i + half]);
  }
}

// A query or key as attention multiplies it: RoPE(x / rms(x) * norm), in memory that the next call takes over. `norm`
// 0: none. T: float or bf16; `Args`: of a task that appends.
template <class Args, class T>
const float* rotated_head(const Context& context, const Args& args, const T* in, uint64_t norm, uint32_t position) {
  struct HeadTag;
  const uint32_t n = args.head_dim;
  float* x = simd::scratch<HeadTag>(n);
  widen(x, in, n);
  if (const float* weight = context.at<float>(norm)) {
    const float scale = over_rms(x, n, args.eps);
    for (uint32_t i = 0; i < n; ++i) x[i] = x[i] * scale * weight[i];
  }
  rotate(x, context.at<float>(args.rope) + uint64_t{position} * n, n / 2);
  return x;
}

// Offset in elements of a position's row in the caches.
template <class Args>
uint64_t cache_index(const Context& context, const Args& args, int32_t slot, uint32_t kv_head, uint32_t position) {
  return uint64_t{
             cache_row(context.at<int32_t>(args.page_table), args, static_cast<uint32_t>(slot), kv_head, position)} *
         args.head_dim;
}

// A key, normed and rotated, and its value to the caches, rounded to bf16.
template <class Args, class T>
void append_head(const Context& context, const Args& args, int32_t slot, uint32_t kv_head, uint32_t position,
                 const T* key, const T* value) {
  const uint32_t n = args.head_dim;
  const uint64_t at = cache_index(context, args, slot, kv_head, position);
  simd::to_bf16(context.at<uint16_t>(args.k_cache) + at, rotated_head(context, args, key, args.k_norm, position), n);
  round(context.at<uint16_t>(args.v_cache) + at, value, n);
}

}  // namespace distmk
