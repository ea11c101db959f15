// What bodies do with a row, whatever iteration it is of: RMSNorm, sums, rounding, the best of its logits.
#pragma once
#include "host/simd.h"
#include "runtime/argmax.h"
#include "runtime/pointwise.h"
#include "runtime/rms.h"

namespace distmk {

inline float over_rms(const float* x, uint32_t n, float eps) { return over_rms(simd::sum_squares(x, n), n, eps); }

inline void add_row(float* __restrict out, const float* __restrict x, uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) out[i] += x[i];
}
inline void multiply_row(float* __restrict out, const float* __restrict x, uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) out[i] *= x[i];
}
// out += x * scale * weight: what a norm behind a projection adds.
inline void add_normalized(float* __restrict out, const float* __restrict x, float scale, const float* weight,
                           uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) out[i] += x[i] * scale * weight[i];
}

// cap * tanh(x / cap), in place; a cap of 0: nothing.
inline void softcap_row(float* x, uint32_t n, float cap) {
  using namespace simd;
  for (uint32_t i = 0; cap != 0.0f && i < n; i += LANES) {
    float lanes[LANES] = {};
    const uint32_t count = n - i < LANES ? n - i : LANES;
    memcpy(lanes, x + i, count * sizeof(float));
    store(lanes, softcapped<VectorMath>(load(lanes), cap));
    memcpy(x + i, lanes, count * sizeof(float));
  }
}

// Columns from `first_col` on of a token's row of an embedding table. A rank has the tokens from args.first_token to
// args.last_token; any other token becomes zeros.
template <class Args>
void embed_row(float* out, const uint16_t* table, const Args& args, int32_t token, uint32_t first_col, uint32_t n) {
  const auto id = static_cast<uint32_t>(token);
  if (id >= args.first_token && id < args.last_token)
    simd::from_bf16(out, table + uint64_t{id - args.first_token} * args.k + first_col, n);
  else
    simd::clear(out, 1, 0, n);
}

// The best logit of columns `begin` to `end` - 1; column 0 belongs to `first_token`.
inline Candidate best_of(const float* logits, uint32_t begin, uint32_t end, uint32_t first_token) {
  Candidate best{-INFINITY, -1};
  for (uint32_t i = begin; i < end; ++i) best = better_of(best, {logits[i], static_cast<int32_t>(first_token + i)});
  return best;
}

}  // namespace distmk
