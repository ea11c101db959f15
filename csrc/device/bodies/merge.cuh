// The merge of attention's splits.
#pragma once
#include "device/arriving.cuh"
#include "device/heads.cuh"
#include "runtime/splits.h"

namespace distmk {

// 32 elements of one head and row, by a warp: each lane weighs a split, then eight lanes a split add up the splits,
// four elements each. `splits` up to 32, of which `parts` are the first one's. All loads are on their way before the
// first is used, and none has a condition: what there is none of is of the first split and elements once more, and
// weighs nothing.
struct SliceParts {
  static constexpr uint32_t GROUPS = 4, SPLITS = 32 / GROUPS;  // of lanes, which take every GROUPS-th split
  float* parts;
  uint32_t splits, num_elements;
  uint4 header, values[SPLITS];  // of split threadIdx.x % 32; of those of this lane's group

  DISTMK_FN static uint32_t element() { return threadIdx.x % (32 / GROUPS) * 4; }
  DISTMK_FN static uint32_t split(uint32_t i) { return threadIdx.x % 32 / (32 / GROUPS) + i * GROUPS; }
  DISTMK_FN uint4* header_at(uint32_t s) const { return reinterpret_cast<uint4*>(parts + s * PART_FLOATS); }
  DISTMK_FN uint4* values_at(uint32_t s, uint32_t e) const {
    return reinterpret_cast<uint4*>(parts + s * PART_FLOATS + PART_HEADER + e);
  }

  // Whether all of it is there.
  DISTMK_FN bool load() {
    const uint32_t lane = threadIdx.x % 32, e = element() < num_elements ? element() : 0;
    header = load_arriving(header_at(lane < splits ? lane : 0));
#pragma unroll
    for (uint32_t i = 0; i < SPLITS; ++i) values[i] = load_arriving(values_at(split(i) < splits ? split(i) : 0, e));
    bool all = header.x && header.y;
#pragma unroll
    for (const uint4& v : values) all = all && v.x && v.y && v.z && v.w;
    return all;
  }

  // Element `element() + threadIdx.x % 32 / (32 / GROUPS)` of the slice.
  DISTMK_FN float merge() const {
    const uint32_t lane = threadIdx.x % 32, group = lane / (32 / GROUPS);
    const float mine = lane < splits ? __uint_as_float(header.x) : -INFINITY;
    float maximum = mine;
    for (uint32_t step = 16; step; step >>= 1) maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, step));
    float weight = mine > -INFINITY ? __expf(mine - maximum) : 0.0f;
    weight = __fdividef(weight, attention::warp_sum(__uint_as_float(header.y) * weight));
    float acc[4] = {};
#pragma unroll
    for (uint32_t i = 0; i < SPLITS; ++i) {
      const float share = __shfl_sync(~0u, weight, split(i));
      const uint32_t bits[4] = {values[i].x, values[i].y, values[i].z, values[i].w};
#pragma unroll
      for (uint32_t e = 0; e < 4; ++e) acc[e] += __uint_as_float(bits[e]) * share;
    }
#pragma unroll
    for (float& sum : acc)
      for (uint32_t step = 32 / GROUPS; step < 32; step <<= 1) sum += __shfl_xor_sync(~0u, sum, step);
    return group == 0 ? acc[0] : group == 1 ? acc[1] : group == 2 ? acc[2] : acc[3];
  }

  // What is there once more has been read by several lanes.
  DISTMK_FN void clear() const {
    __syncwarp();
    const uint32_t lane = threadIdx.x % 32;
    if (lane < splits) *header_at(lane) = {0, 0, 0, 0};
#pragma unroll
    for (uint32_t i = 0; i < SPLITS; ++i)
      if (split(i) < splits && element() < num_elements) *values_at(split(i), element()) = {0, 0, 0, 0};
  }
};

DISTMK_FN void body_merge(Context& context, const MergeArgs& args) {
  static_assert(MERGE_SLICE == 32, "four elements each of eight lanes");
  const Batch& batch = *context.batch(args.batch);
  if (is_lone(args, batch.num_rows, batch.runs[0])) return context.inputs_found();
  const Splits splits(args, batch);
  const ArrivingVector out{context.at<__nv_bfloat16>(args.out), context.at<__nv_bfloat16>(args.cleared)};
  for (uint32_t i = threadIdx.x / 32; i < batch.num_rows * args.num_slices; i += NUM_WARPS) {
    const uint32_t row = i / args.num_slices, index = i % args.num_slices;
    const MergeSlice slice(args, index);
    SliceParts parts;
    parts.parts =
        context.at<float>(args.part) + index * slice_floats(args.max_splits) + part_begin(row, 0, args.max_splits);
    parts.splits = splits.of(run_of(batch, row));
    parts.num_elements = slice.end - slice.begin;
    if (args.arriving)
      context.look_for_inputs();
    else if (!context.inputs_ready())
      return;
    context.look(args.arriving, [&] { return parts.load(); });
    context.inputs_found();
    const float value = parts.merge();
    const uint32_t e = SliceParts::element() + threadIdx.x % 32 / (32 / SliceParts::GROUPS);
    if (e < parts.num_elements)
      out.store(uint64_t{row} * args.out_stride + slice.head * args.head_dim + slice.begin + e, value);
    if (args.arriving) parts.clear();
  }
  context.inputs_found();  // some warps have nothing to look for
}

}  // namespace distmk
