// A linear task's activations in shared memory, as a tensor core takes them.
#pragma once
#include "device/matrix.cuh"
#include "device/shared.cuh"
#include "runtime/context.h"

namespace distmk {
namespace linear {

constexpr uint32_t X_PAD = 8;  // bf16 elements between columns, so that a fragment's columns lie in different banks

// The task's activations, rounded to bf16, a token row a column of the product. All of K where it fits, else the block
// of K that is being multiplied.
struct Activations {
  const float* x;
  const float* norm;
  uint32_t k, k_pitch, x_stride, num_rows;
  bool resident;

  DISTMK_FN uint32_t column_stride() const { return (resident ? k_pitch : BLOCK_K) + X_PAD; }
  DISTMK_FN uint32_t first_of(uint32_t k0) const { return resident ? 0 : k0; }
};

DISTMK_FN Activations activations_of(Context& context, const LinearArgs& args, uint32_t num_rows) {
  const uint32_t whole_bytes = num_rows * (args.k_pitch + X_PAD) * sizeof(__nv_bfloat16);
  return {context.at<float>(args.x),  context.at<float>(args.norm), args.k, args.k_pitch, args.x_stride, num_rows,
          whole_bytes <= VECTOR_BYTES};
}

// Four activations from `k` on, zeros behind the end.
DISTMK_FN float4 load_four(const float* x, uint32_t k, uint32_t end, bool aligned) {
  if (aligned && k + 4 <= end) return __ldcg(reinterpret_cast<const float4*>(x + k));
  const auto at = [&](uint32_t i) { return i < end ? __ldcg(x + i) : 0.0f; };
  return {at(k), at(k + 1), at(k + 2), at(k + 3)};
}

DISTMK_FN float dot(const float4& a, const float4& b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }

// Four activations times the norm's weights.
DISTMK_FN void store_four(const float4& v, const float4& g, __nv_bfloat16* out) {
  *reinterpret_cast<uint2*>(out) = {pack_bf16(v.x * g.x, v.y * g.y), pack_bf16(v.z * g.z, v.w * g.w)};
}

// A row's squares, those of the columns before `k0` known already.
DISTMK_FN void keep_squares(const Team& team, uint32_t row, uint32_t k0, float squares) {
  for (uint32_t step = 16; step; step >>= 1) squares += __shfl_xor_sync(~0u, squares, step);
  float& sum = shared().squares[row][team.index / 32];
  if (team.index % 32 == 0) sum = k0 ? sum + squares : squares;
}

constexpr uint32_t PIECE = 4 * NUM_CONSUMERS;  // columns that the team loads at once, 16 bytes a thread
constexpr uint32_t IN_FLIGHT = 4;              // pieces: each takes a trip to the second-level cache

// Brings [k0, k1) of all rows into shared memory; `add_squares`: adds up their squares too. Any number of rows, any
// alignment.
static __device__ __noinline__ void stage_any(const Team team, const Activations a, uint32_t k0, uint32_t k1,
                                              bool add_squares) {
  const bool aligned = (reinterpret_cast<uint64_t>(a.x) | reinterpret_cast<uint64_t>(a.norm)) % 16 == 0 &&
                       (a.num_rows == 1 || a.x_stride % 4 == 0);
  auto* columns = reinterpret_cast<__nv_bfloat16*>(shared().vector);
  for (uint32_t first = 0; first < a.num_rows; first += IN_FLIGHT) {
    float squares[IN_FLIGHT] = {};
    for (uint32_t k = k0 + 4 * team.index; k < k1; k += PIECE) {
      const float4 g = a.norm ? load_four(a.norm, k, a.k, aligned) : float4{1, 1, 1, 1};
      float4 v[IN_FLIGHT];
#pragma unroll
      for (uint32_t i = 0; i < IN_FLIGHT; ++i)
        if (first + i < a.num_rows) v[i] = load_four(a.x + uint64_t{first + i} * a.x_stride, k, a.k, aligned);
#pragma unroll
      for (uint32_t i = 0; i < IN_FLIGHT; ++i) {
        if (first + i >= a.num_rows) break;
        squares[i] += dot(v[i], v[i]);
        store_four(v[i], g, columns + (first + i) * a.column_stride() + k - k0);
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < IN_FLIGHT; ++i)
      if (add_squares && first + i < a.num_rows) keep_squares(team, first + i, k0, squares[i]);
  }
}

DISTMK_FN uint32_t num_rows(const RankState& state, const LinearArgs& args) {
  if (!args.batch) return 1;
  return (state.near_batch ? state.near_batch : reinterpret_cast<const Batch*>(state.address(args.batch)))->num_rows;
}

// One row of activations that 16 bytes at a time can be read of, and that fits.
DISTMK_FN bool is_single(const RankState& state, const LinearArgs& args) {
  const uint64_t addresses = state.address(args.x) | (args.norm ? state.address(args.norm) : 0);
  return (addresses | (args.k * sizeof(float))) % 16 == 0 &&
         (args.k_pitch + X_PAD) * sizeof(__nv_bfloat16) <= VECTOR_BYTES && num_rows(state, args) == 1;
}

// The same of a single row, which is what most tasks have: all of it is in flight at once, and the norm's weights,
// which no task writes, before the activations are ready. False: they never will be.
DISTMK_FN bool stage_row(Context& context, const Activations& a) {
  const Team& team = context.team;
  auto* column = reinterpret_cast<__nv_bfloat16*>(shared().vector);
  float squares = 0;
#pragma unroll 1
  for (uint32_t first = 4 * team.index; first < a.k_pitch || first == 4 * team.index; first += IN_FLIGHT * PIECE) {
    float4 v[IN_FLIGHT], g[IN_FLIGHT];
#pragma unroll
    for (uint32_t i = 0; i < IN_FLIGHT; ++i) {
      const uint32_t k = first + i * PIECE;
      g[i] = a.norm && k < a.k ? __ldcg(reinterpret_cast<const float4*>(a.norm + k)) : float4{1, 1, 1, 1};
    }
    if (!context.inputs_ready()) return false;
#pragma unroll
    for (uint32_t i = 0; i < IN_FLIGHT; ++i) {
      const uint32_t k = first + i * PIECE;
      v[i] = k < a.k ? __ldcg(reinterpret_cast<const float4*>(a.x + k)) : float4{0, 0, 0, 0};
    }
#pragma unroll
    for (uint32_t i = 0; i < IN_FLIGHT; ++i) {
      const uint32_t k = first + i * PIECE;
      squares += dot(v[i], v[i]);
      if (k < a.k_pitch) store_four(v[i], g[i], column + k);
    }
  }
  if (a.norm) keep_squares(team, 0, 0, squares);
  return true;
}

}  // namespace linear
}  // namespace distmk
