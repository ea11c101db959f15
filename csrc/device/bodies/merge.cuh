// The merge of attention's splits.
#pragma once
#include "device/heads.cuh"
#include "runtime/splits.h"

namespace distmk {

// One head and row, by a warp: each lane weighs a split, then all add up the splits in order. `splits` up to 32.
DISTMK_FN void merge_row(const float* parts, uint32_t splits, uint32_t dim, float* out) {
  constexpr uint32_t IN_FLIGHT = 8;
  const uint32_t stride = 2 + dim, lane = threadIdx.x % 32;
  float2 mine = {-INFINITY, 0};  // maximum and sum
  if (lane < splits) mine = {__ldcg(parts + lane * stride), __ldcg(parts + lane * stride + 1)};
  float maximum = mine.x;
  for (uint32_t step = 16; step; step >>= 1) maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, step));
  float weight = mine.x > -INFINITY ? __expf(mine.x - maximum) : 0.0f;
  weight /= attention::warp_sum(mine.y * weight);
  for (uint32_t first = 0; first < dim; first += 64) {
    const uint32_t d = first + lane;
    const bool one = d < dim, both = d + 32 < dim;
    float2 acc = {0, 0};
    for (uint32_t begin = 0; begin < splits; begin += IN_FLIGHT) {
      float2 value[IN_FLIGHT];
#pragma unroll
      for (uint32_t i = 0; i < IN_FLIGHT; ++i) {
        value[i] = {0, 0};
        const float* part = parts + (begin + i) * stride + 2 + d;
        if (begin + i < splits && one) value[i] = {__ldcg(part), both ? __ldcg(part + 32) : 0.0f};
      }
#pragma unroll
      for (uint32_t i = 0; i < IN_FLIGHT; ++i) {
        const float share = __shfl_sync(~0u, weight, (begin + i) % 32);
        if (begin + i >= splits) continue;
        acc.x += value[i].x * share;
        acc.y += value[i].y * share;
      }
    }
    if (one) out[d] = acc.x;
    if (both) out[d + 32] = acc.y;
  }
}

DISTMK_FN void body_merge(Context& context, const MergeArgs& args) {
  const Batch& batch = *context.batch(args.batch);
  const uint32_t stride = 2 + args.head_dim, warp = threadIdx.x / 32;
  for (uint32_t r = 0; r < batch.num_runs; ++r) {
    const BatchRun run = batch.runs[r];
    const uint32_t splits = num_splits(batch, run, args.num_kv, args.num_workers, args.min_split, args.max_splits);
    for (uint32_t i = warp; i < args.num_heads * run.num_rows; i += NUM_WARPS) {
      const uint32_t head = i % args.num_heads, row = run.row_begin + i / args.num_heads;
      merge_row(context.at<float>(args.part) + (uint64_t{head} * MAX_ROWS + row) * args.max_splits * stride, splits,
                args.head_dim, context.at<float>(args.out) + uint64_t{row} * args.out_stride + head * args.head_dim);
    }
  }
}

}  // namespace distmk
