// The merge of attention's splits.
#pragma once
#include "device/attention/qk_norm_rope.cuh"
#include "device/comm/lamport.cuh"
#include "runtime/splits.h"

namespace distmk {

// 32 elements of one head and row, by a warp: each lane weighs a split, then eight lanes a split add up the splits,
// four elements each. `splits` up to 32, of which `parts` are the first one's. All loads are on their way before the
// first is used, and none has a condition but that the second half of the splits is asked for only if there is any:
// what there is none of is of the first split and elements once more, and weighs nothing.
struct SliceParts {
  static constexpr uint32_t GROUPS = 4, SPLITS = 32 / GROUPS;  // of lanes, which take every GROUPS-th split
  static constexpr uint32_t HALF = SPLITS / 2;
  float* parts;
  uint32_t splits, num_elements;
  uint4 header, values[SPLITS];  // of split threadIdx.x % 32; of those of this lane's group

  DISTMK_FN static uint32_t element() { return threadIdx.x % (32 / GROUPS) * 4; }
  DISTMK_FN static uint32_t split(uint32_t i) { return threadIdx.x % 32 / (32 / GROUPS) + i * GROUPS; }
  DISTMK_FN uint4* header_at(uint32_t s) const { return reinterpret_cast<uint4*>(parts + s * PARTIAL_FLOATS); }
  DISTMK_FN uint4* values_at(uint32_t s, uint32_t e) const {
    return reinterpret_cast<uint4*>(parts + s * PARTIAL_FLOATS + PARTIAL_HEADER_FLOATS + e);
  }

  DISTMK_FN bool has_second_half() const { return splits > HALF * GROUPS; }

  // Whether all of it is there.
  DISTMK_FN bool load() {
    const uint32_t lane = threadIdx.x % 32, e = element() < num_elements ? element() : 0;
    header = poll_load(header_at(lane < splits ? lane : 0));
    const auto load_half = [&](uint32_t first) {
#pragma unroll
      for (uint32_t i = first; i < first + HALF; ++i)
        values[i] = poll_load(values_at(split(i) < splits ? split(i) : 0, e));
    };
    const auto is_there = [&](uint32_t first) {
      bool all = true;
#pragma unroll
      for (uint32_t i = first; i < first + HALF; ++i) all = all && words_published(values[i]);
      return all;
    };
    load_half(0);
    if (has_second_half()) {
      load_half(HALF);
    } else {  // or the compiler would keep their registers for whatever they hold, in all other tasks too
#pragma unroll
      for (uint32_t i = HALF; i < SPLITS; ++i) values[i] = eight_zeros();
    }
    return header.x && header.y && is_there(0) && (!has_second_half() || is_there(HALF));
  }

  // Element `element() + threadIdx.x % 32 / (32 / GROUPS)` of the slice.
  DISTMK_FN float combine() const {
    const uint32_t lane = threadIdx.x % 32, group = lane / (32 / GROUPS);
    const float mine = lane < splits ? __uint_as_float(header.x) : -INFINITY;
    float maximum = mine;
    for (uint32_t step = 16; step; step >>= 1) maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, step));
    float weight = mine > -INFINITY ? __expf(mine - maximum) : 0.0f;
    weight = __fdividef(weight, attention::warp_sum(__uint_as_float(header.y) * weight));
    float acc[4] = {};
    const auto add_half = [&](uint32_t first) {
#pragma unroll
      for (uint32_t i = first; i < first + HALF; ++i) {
        const float share = __shfl_sync(~0u, weight, split(i));
        const uint32_t bits[4] = {values[i].x, values[i].y, values[i].z, values[i].w};
#pragma unroll
        for (uint32_t e = 0; e < 4; ++e) acc[e] += __uint_as_float(bits[e]) * share;
      }
    };
    add_half(0);
    if (has_second_half()) add_half(HALF);
#pragma unroll
    for (float& sum : acc)
      for (uint32_t step = 32 / GROUPS; step < 32; step <<= 1) sum += __shfl_xor_sync(~0u, sum, step);
    return group == 0 ? acc[0] : group == 1 ? acc[1] : group == 2 ? acc[2] : acc[3];
  }

  // What is there once more has been read by several lanes.
  DISTMK_FN void clear() const {
    __syncwarp();
    const uint32_t lane = threadIdx.x % 32;
    if (lane < splits) publish_store(header_at(lane), uint4{0, 0, 0, 0});
#pragma unroll
    for (uint32_t i = 0; i < SPLITS; ++i)
      if (split(i) < splits && element() < num_elements)
        publish_store(values_at(split(i), element()), uint4{0, 0, 0, 0});
  }
};

// The same of rows of few splits: four of them at once, eight lanes a row, four elements a lane, and no lane needs what
// another has.
struct RowsOfFew {
  static constexpr uint32_t ROWS = 4, SPLITS = 2;
  float* parts;     // of this lane's row
  uint32_t splits;  // of it
  float2 headers[SPLITS];
  uint4 values[SPLITS];

  DISTMK_FN static uint32_t row() { return threadIdx.x % 32 / (32 / ROWS); }
  DISTMK_FN static uint32_t element() { return threadIdx.x % (32 / ROWS) * 4; }

  // Whether all of it is there.
  DISTMK_FN bool load() {
#pragma unroll
    for (uint32_t s = 0; s < SPLITS; ++s) {
      const float* partials = parts + (s < splits ? s : 0) * PARTIAL_FLOATS;
      headers[s] = poll_load(reinterpret_cast<const float2*>(partials));
      values[s] = poll_load(reinterpret_cast<const uint4*>(partials + PARTIAL_HEADER_FLOATS + element()));
    }
    bool all = true;
#pragma unroll
    for (uint32_t s = 0; s < SPLITS; ++s)
      all = all && __float_as_uint(headers[s].x) && __float_as_uint(headers[s].y) && words_published(values[s]);
    return all;
  }

  DISTMK_FN void combine(float (&combined)[4]) const {
    static_assert(SPLITS == 2, "");
    const bool two = splits == 2;
    const float maximum = two ? fmaxf(headers[0].x, headers[1].x) : headers[0].x;
    const float a = __expf(headers[0].x - maximum), b = two ? __expf(headers[1].x - maximum) : 0.0f;
    const float scale = __fdividef(1.0f, headers[0].y * a + headers[1].y * b);
    const uint32_t first[4] = {values[0].x, values[0].y, values[0].z, values[0].w};
    const uint32_t second[4] = {values[1].x, values[1].y, values[1].z, values[1].w};
#pragma unroll
    for (uint32_t e = 0; e < 4; ++e)
      combined[e] = __uint_as_float(first[e]) * (a * scale) + __uint_as_float(second[e]) * (b * scale);
  }

  // By lanes that are one of a row's.
  DISTMK_FN void clear() const {
    for (uint32_t s = 0; s < splits; ++s) {
      float* partials = parts + s * PARTIAL_FLOATS;
      if (element() == 0) publish_store(reinterpret_cast<uint4*>(partials), {0, 0, 0, 0});
      publish_store(reinterpret_cast<uint4*>(partials + PARTIAL_HEADER_FLOATS + element()), {0, 0, 0, 0});
    }
  }
};

DISTMK_FN bool look_for(Context& context, const CombineArgs& args) {
  if (!args.polls) return context.inputs_ready();
  context.begin_polling();
  return true;
}

// Of all rows, whose splits lanes have in order.
DISTMK_FN void combine_rows_of_few(Context& context, const CombineArgs& args, const Batch& batch, uint32_t splits,
                                   const LamportVector& out) {
  const auto num_rows = static_cast<uint32_t>(batch.num_rows);
  const uint32_t num_quads = (num_rows + RowsOfFew::ROWS - 1) / RowsOfFew::ROWS;
  for (uint32_t i = threadIdx.x / 32; i < num_quads * args.num_slices; i += NUM_WARPS) {
    const uint32_t index = i % args.num_slices, mine = i / args.num_slices * RowsOfFew::ROWS + RowsOfFew::row();
    const uint32_t row = min(mine, num_rows - 1);
    const CombineSlice slice(args, index);
    RowsOfFew few;
    few.parts = context.at<float>(args.partials) + index * slice_floats(args.max_splits) +
                partial_begin(row, 0, args.max_splits);
    few.splits = __shfl_sync(~0u, splits, row);
    if (!look_for(context, args)) return;
    context.poll(args.polls, [&] { return few.load(); });
    context.inputs_polled();
    float combined[4];
    few.combine(combined);
    __syncwarp();  // what is cleared has been read by several lanes
    if (mine >= num_rows) continue;
    out.publish_four(uint64_t{row} * args.out_stride + slice.head * args.head_dim + slice.begin + few.element(),
                     combined);
    if (args.polls) few.clear();
  }
}

DISTMK_FN void body_combine(Context& context, const CombineArgs& args) {
  static_assert(COMBINE_SLICE == 32, "four elements each of eight lanes");
  const Batch& batch = *context.batch(args.batch);
  if (fuses_combine(args, batch.num_rows, batch.runs[0])) return context.inputs_polled();
  const Splits splits(args, batch);
  const LamportVector out{context.at<__nv_bfloat16>(args.out), context.at<__nv_bfloat16>(args.reset)};
  const uint32_t lane = threadIdx.x % 32, of_lane = lane < batch.num_rows ? splits.of(run_of(batch, lane)) : 1;
  const bool of_fours = args.head_dim % COMBINE_SLICE == 0 && out.takes_four(args.out_stride);
  if (of_fours && __all_sync(~0u, of_lane <= RowsOfFew::SPLITS)) {
    combine_rows_of_few(context, args, batch, of_lane, out);
    return context.inputs_polled();  // some warps have nothing to look for
  }
  for (uint32_t i = threadIdx.x / 32; i < batch.num_rows * args.num_slices; i += NUM_WARPS) {
    const uint32_t row = i / args.num_slices, index = i % args.num_slices;
    const CombineSlice slice(args, index);
    SliceParts parts;
    parts.parts = context.at<float>(args.partials) + index * slice_floats(args.max_splits) +
                  partial_begin(row, 0, args.max_splits);
    parts.splits = splits.of(run_of(batch, row));
    parts.num_elements = slice.end - slice.begin;
    if (!look_for(context, args)) return;
    context.poll(args.polls, [&] { return parts.load(); });
    context.inputs_polled();
    const float value = parts.combine();
    const uint32_t e = SliceParts::element() + threadIdx.x % 32 / (32 / SliceParts::GROUPS);
    if (e < parts.num_elements)
      out.store(uint64_t{row} * args.out_stride + slice.head * args.head_dim + slice.begin + e, value);
    if (args.polls) parts.clear();
  }
  context.inputs_polled();
}

}  // namespace distmk
