// The sampled rows of a job iteration: select_rows gathers them for the head, and argmax_rows finds the best of their
// logits.
#pragma once
#include "device/core/bf16.cuh"
#include "device/core/shared.cuh"
#include "device/sampling/argmax.cuh"
#include "runtime/job_batch.h"

namespace distmk {

// Rows in the order of lanes are copied as they are: as tiles, and to the end of the last block, where the last columns
// may be anywhere.
DISTMK_FN bool has_lane_order(const SelectRowsArgs& args) {
  return HAS_PACKED_WEIGHTS && args.tiled == static_cast<uint32_t>(ActivationLayout::LANE_TILES);
}
DISTMK_FN uint32_t copied_layout(const SelectRowsArgs& args) {
  return has_lane_order(args) ? static_cast<uint32_t>(ActivationLayout::TILES) : args.tiled;
}
DISTMK_FN uint32_t copied_cols(const SelectRowsArgs& args) {
  if (!has_lane_order(args)) return args.k;
  return (args.k + ACTIVATION_BLOCK_COLS - 1) / ACTIVATION_BLOCK_COLS * ACTIVATION_BLOCK_COLS;
}

DISTMK_FN void body_select_rows(Context& context, const SelectRowsArgs& args) {
  const uint32_t num_sampled = context.batch(args.batch)->num_rows;
  const uint32_t* sampled = job_batch(context, args.batch).sampled;
  const auto* x = context.at<__nv_bfloat16>(args.x);
  auto* out = context.at<__nv_bfloat16>(args.out);
  const bool in_chunks = args.tiled || (args.k % 8 == 0 && (args.x | args.out) % 16 == 0);
  for (uint32_t to = context.instance; to < num_sampled; to += context.rank_state.program->num_workers) {
    const uint32_t from = __ldcg(sampled + to), whole = in_chunks ? copied_cols(args) / 8 : 0;
    const auto offset = [&](uint32_t row, uint32_t col) {
      return activation_offset(row, col, args.k, copied_layout(args));
    };
    for (uint32_t i = context.team.index; i < whole; i += context.team.size)
      *reinterpret_cast<uint4*>(out + offset(to, 8 * i)) =
          __ldcg(reinterpret_cast<const uint4*>(x + offset(from, 8 * i)));
    for (uint32_t col = 8 * whole + context.team.index; col < copied_cols(args); col += context.team.size)
      reinterpret_cast<unsigned short*>(out)[offset(to, col)] =
          __ldcg(reinterpret_cast<const unsigned short*>(x) + offset(from, col));
  }
}

// The best of this lane's columns in a part of a row: begin + lane, begin + lane + 32, and so on. Loads are
// unconditional, because the compiler would wait for a conditional load before the next. Beyond the end they load the
// last column again.
DISTMK_FN Candidate best_of_lane(const float* logits, uint32_t begin, uint32_t end, uint32_t first_token) {
  constexpr uint32_t IN_FLIGHT = 16;
  Candidate best = {-INFINITY, -1};
#pragma unroll 1
  for (uint32_t first = begin + threadIdx.x % 32; first < end; first += 32 * IN_FLIGHT) {
    const auto col = [&](uint32_t i) { return min(first + 32 * i, end - 1); };
    float loaded[IN_FLIGHT];
#pragma unroll
    for (uint32_t i = 0; i < IN_FLIGHT; ++i) loaded[i] = __ldcg(logits + col(i));
#pragma unroll
    for (uint32_t i = 0; i < IN_FLIGHT; ++i)
      best = better_of(best, {loaded[i], static_cast<int32_t>(first_token + col(i))});
  }
  return best;
}

// A warp takes a row.
DISTMK_FN void body_argmax_rows(Context& context, const ArgmaxRowsArgs& args) {
  const uint32_t num_rows = context.batch(args.batch)->num_rows;
  for (uint32_t part = context.instance; part < args.num_parts; part += context.rank_state.program->num_workers) {
    const auto bound = [&](uint32_t p) { return static_cast<uint32_t>(uint64_t{args.num_cols} * p / args.num_parts); };
    const uint32_t begin = bound(part), end = bound(part + 1);
    for (uint32_t row = threadIdx.x / 32; row < num_rows; row += NUM_WARPS) {
      const float* logits = context.at<float>(args.logits) + uint64_t{row} * args.stride;
      const Candidate best = warp_argmax(best_of_lane(logits, begin, end, args.first_token));
      if (threadIdx.x % 32 == 0) context.at<Candidate>(args.out)[part * args.num_rows + row] = best;
    }
  }
}

}  // namespace distmk
