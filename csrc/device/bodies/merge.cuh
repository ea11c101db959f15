// The merge of attention's splits.
#pragma once
#include "device/arriving.cuh"
#include "device/heads.cuh"
#include "runtime/splits.h"

namespace distmk {

// 32 elements of one head and row, by a warp: each lane weighs a split, then all add up the splits in order. `splits`
// up to 32. All loads of up to IN_FLIGHT splits are on their way before the first is used.
DISTMK_FN void merge_slice(const float* parts, uint32_t splits, uint32_t dim, uint32_t first, const ArrivingVector& out,
                           uint64_t out_begin) {
  constexpr uint32_t IN_FLIGHT = 16;
  static_assert(MERGE_SLICE == 32, "a lane an element");
  const uint32_t stride = 2 + dim, lane = threadIdx.x % 32, d = first + lane;
  float2 mine = {-INFINITY, 0};  // maximum and sum
  if (lane < splits) mine = __ldcg(reinterpret_cast<const float2*>(parts + lane * stride));
  const auto load = [&](uint32_t begin, float (&value)[IN_FLIGHT]) {
#pragma unroll
    for (uint32_t i = 0; i < IN_FLIGHT; ++i)
      value[i] = begin + i < splits && d < dim ? __ldcg(parts + (begin + i) * stride + 2 + d) : 0.0f;
  };
  float value[IN_FLIGHT], acc = 0;
  load(0, value);
  float maximum = mine.x;
  for (uint32_t step = 16; step; step >>= 1) maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, step));
  float weight = mine.x > -INFINITY ? __expf(mine.x - maximum) : 0.0f;
  weight = __fdividef(weight, attention::warp_sum(mine.y * weight));
  for (uint32_t begin = 0;;) {
#pragma unroll
    for (uint32_t i = 0; i < IN_FLIGHT; ++i) acc += value[i] * __shfl_sync(~0u, weight, begin + i);
    if ((begin += IN_FLIGHT) >= splits) break;
    load(begin, value);
  }
  if (d < dim) out.store(out_begin + d, acc);
}

DISTMK_FN void body_merge(Context& context, const MergeArgs& args) {
  const Batch& batch = *context.batch(args.batch);
  const Splits splits(args, batch);
  const uint32_t stride = 2 + args.head_dim;
  const ArrivingVector out{context.at<__nv_bfloat16>(args.out), context.at<__nv_bfloat16>(args.cleared)};
  for (uint32_t i = threadIdx.x / 32; i < batch.num_rows * args.num_slices; i += NUM_WARPS) {
    const uint32_t row = i / args.num_slices;
    const MergeSlice slice(args, i % args.num_slices);
    const uint32_t num_splits = splits.of(run_of(batch, row));
    if (!context.inputs_ready()) return;
    merge_slice(context.at<float>(args.part) + (uint64_t{slice.head} * MAX_ROWS + row) * args.max_splits * stride,
                num_splits, args.head_dim, slice.begin, out,
                uint64_t{row} * args.out_stride + slice.head * args.head_dim);
  }
}

}  // namespace distmk
