// What attention does with each head before it is multiplied or stored: QK-norm, RoPE, rounding, the append to the
// caches.
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

// `table` has n / 2 cosines, then n / 2 sines.
inline void rotate(float* x, const float* table, uint32_t n) {
  using namespace simd;
  const uint32_t half = n / 2;
  uint32_t i = 0;
  for (; i + LANES <= half; i += LANES) {
    const Vec a = load(x + i), b = load(x + half + i), cosine = load(table + i), sine = load(table + half + i);
    store(x + i, rotated_first(a, b, cosine, sine));
    store(x + half + i, rotated_second(a, b, cosine, sine));
  }
  for (; i < half; ++i) {
    const float a = x[i], b = x[half + i], cosine = table[i], sine = table[half + i];
    x[i] = rotated_first(a, b, cosine, sine);
    x[half + i] = rotated_second(a, b, cosine, sine);
  }
}

// Offset, in elements, of a position's row in the caches.
template <class Args>
uint64_t cache_index(const Context& context, const Args& args, int32_t slot, uint32_t kv_head, uint32_t position) {
  const int32_t* page_table = context.at<int32_t>(args.page_table);
  return uint64_t{cache_row(page_table, args, static_cast<uint32_t>(slot), kv_head, position)} * args.head_dim;
}

// The heads of a task that appends to the caches, set up once for all of its rows. T is float or bf16.
template <class Args>
class Heads {
 public:
  Heads(const Context& context, const Args& args)
      : context_(context),
        args_(args),
        q_norm_(context.at<float>(args.q_norm)),
        k_norm_(context.at<float>(args.k_norm)),
        rope_(context.at<float>(args.rope)),
        k_cache_(context.at<uint16_t>(args.k_cache)),
        v_cache_(context.at<uint16_t>(args.v_cache)),
        rotated_(simd::scratch<HeadTag>(args.head_dim)) {}

  // The query that attention multiplies: normalized and rotated. The next head overwrites it.
  template <class T>
  const float* query(const T* in, uint32_t position) const {
    return rotated(in, q_norm_, position);
  }
  // Stores the key that attention multiplies, normalized and rotated, and its value. Both are rounded to bf16.
  template <class T>
  void append(int32_t slot, uint32_t kv_head, uint32_t position, const T* key, const T* value) const {
    const uint64_t at = cache_index(context_, args_, slot, kv_head, position);
    simd::to_bf16(k_cache_ + at, rotated(key, k_norm_, position), args_.head_dim);
    round(v_cache_ + at, value, args_.head_dim);
  }

 private:
  struct HeadTag;
  const Context& context_;
  const Args& args_;
  const float *q_norm_, *k_norm_;  // null: none
  const float* rope_;
  uint16_t *k_cache_, *v_cache_;
  float* rotated_;

  // RoPE(x / rms(x) * norm).
  template <class T>
  const float* rotated(const T* in, const float* norm, uint32_t position) const {
    const uint32_t n = args_.head_dim;
    float* x = rotated_;
    widen(x, in, n);
    if (norm) {
      const float scale = over_rms(x, n, args_.eps);
      for (uint32_t i = 0; i < n; ++i) x[i] = x[i] * scale * norm[i];
    }
    rotate(x, rope_ + uint64_t{position} * n, n);
    return x;
  }
};

}  // namespace distmk
