// Operations on one row for bodies of slab and job iterations: RMSNorm, sums, rounding, embedding, the best of its
// logits.
#pragma once
#include "host/formats/stored_rows.h"
#include "host/simd.h"
#include "runtime/argmax.h"
#include "runtime/context.h"
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
// out += x * scale * weight: adds a normalized projection to the residual stream.
inline void add_normalized(float* __restrict out, const float* __restrict x, float scale, const float* weight,
                           uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) out[i] += x[i] * scale * weight[i];
}

// Stores a task's columns of a row of the residual stream as bf16. If the next matrix does not contain the weight of
// its norm, the columns are multiplied by that weight. The sum of their squares is then stored beside them
// (distmk/tasks/input_norm.py).
template <class Args>
void round_row(const Context& context, const Args& args, uint32_t row, const float* x, uint32_t n) {
  if (!args.out_bf16) return;
  auto* out = context.at<uint16_t>(args.out_bf16) + uint64_t{row} * args.out_bf16_stride;
  if constexpr (requires { args.input_norm; })
    if (const float* weight = context.at<float>(args.input_norm.weight)) {
      for (uint32_t i = 0; i < n; ++i) out[i] = simd::to_bf16(x[i] * weight[i]);
      context.at<float>(args.input_norm.squares)[uint64_t{row} * args.input_norm.squares_stride] =
          simd::sum_squares(x, n);
      return;
    }
  simd::to_bf16(out, x, n);
}
template <class Args>
void round_rows(const Context& context, const Args& args, const float* x, uint64_t stride, uint32_t num_rows) {
  for (uint32_t row = 0; row < num_rows; ++row) round_row(context, args, row, x + row * stride, args.num_cols);
  simd::clear(context.at<uint16_t>(args.lamport_reset), num_rows, args.out_bf16_stride, args.num_cols);
}

// cap * tanh(x / cap), in place. A cap of 0 changes nothing.
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

// Columns from `first_col` on of a token's row in an embedding table, times args.scale. A rank has the tokens from
// args.first_token up to, but not including, args.last_token; any other token gives zeros.
template <class Args>
void embed_row(float* out, const StoredRows& table, const Args& args, int32_t token, uint32_t first_col, uint32_t n) {
  const auto id = static_cast<uint32_t>(token);
  if (id < args.first_token || id >= args.last_token) return simd::clear(out, 1, 0, n);
  table.read(id - args.first_token, first_col, first_col + n, out);
  for (uint32_t i = 0; args.scale != 0.0f && i < n; ++i) out[i] *= args.scale;
}

// The best logit of columns `begin` to `end` - 1. Column 0 belongs to `first_token`.
inline Candidate best_of(const float* logits, uint32_t begin, uint32_t end, uint32_t first_token) {
  Candidate best{-INFINITY, -1};
  for (uint32_t i = begin; i < end; ++i) best = better_of(best, {logits[i], static_cast<int32_t>(first_token + i)});
  return best;
}

}  // namespace distmk
