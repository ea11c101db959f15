// The combine task, which follows attention: combines the split-KV partials (m_s, l_s, o_s), s < splits, of a row and a
// slice of 32 elements of a head. The result is sum_s w_s o_s / sum_s w_s l_s with w_s = exp(m_s - max m), in bf16.
// Partials: f32 [slice, row, split, PARTIAL_FLOATS]. A batch-1 row whose combine is fused into the consumer GEMV
// (linear/fused_combine.cuh) has none.
#pragma once
#include "device/attention/lse.cuh"
#include "device/comm/lamport.cuh"
#include "runtime/splits.h"

namespace distmk {
namespace attention {

static_assert(COMBINE_SLICE == 32, "four elements each of eight lanes");
constexpr uint32_t ELEMENT_LANES = COMBINE_SLICE / 4;

// A warp combines one slice of one row with up to 32 splits. Lane s has the header of split s. Four groups of eight
// lanes each take every fourth split's elements, four per lane. All loads are issued before the first is used. No load
// is conditional: a missing split loads the first one again, with a weight of 0. Only the second half of the splits is
// skipped if it is empty.
struct SliceCombine {
  static constexpr uint32_t GROUPS = 32 / ELEMENT_LANES, SPLITS_PER_GROUP = 32 / GROUPS, HALF = SPLITS_PER_GROUP / 2;
  float* partials;  // partials of the first split
  uint32_t num_splits, num_elements;
  uint4 header, elements[SPLITS_PER_GROUP];

  DISTMK_FN static uint32_t first_element() { return threadIdx.x % ELEMENT_LANES * 4; }
  DISTMK_FN static uint32_t group() { return threadIdx.x % 32 / ELEMENT_LANES; }
  // The element that combine() returns.
  DISTMK_FN static uint32_t own_element() { return first_element() + group(); }
  DISTMK_FN static uint32_t split(uint32_t i) { return group() + i * GROUPS; }
  DISTMK_FN uint4* header_at(uint32_t s) const { return reinterpret_cast<uint4*>(partials + s * PARTIAL_FLOATS); }
  DISTMK_FN uint4* elements_at(uint32_t s, uint32_t e) const {
    return reinterpret_cast<uint4*>(partials + s * PARTIAL_FLOATS + PARTIAL_HEADER_FLOATS + e);
  }

  DISTMK_FN bool has_second_half() const { return num_splits > HALF * GROUPS; }

  // Whether everything that was loaded has been published.
  DISTMK_FN bool load() {
    const uint32_t lane = threadIdx.x % 32, e = first_element() < num_elements ? first_element() : 0;
    header = poll_load(header_at(lane < num_splits ? lane : 0));
    const auto load_half = [&](uint32_t first) {
#pragma unroll
      for (uint32_t i = first; i < first + HALF; ++i)
        elements[i] = poll_load(elements_at(split(i) < num_splits ? split(i) : 0, e));
    };
    const auto half_published = [&](uint32_t first) {
      bool all = true;
#pragma unroll
      for (uint32_t i = first; i < first + HALF; ++i) all = all && words_published(elements[i]);
      return all;
    };
    load_half(0);
    if (has_second_half()) {
      load_half(HALF);
    } else {  // otherwise the compiler would keep the registers alive through all other tasks
#pragma unroll
      for (uint32_t i = HALF; i < SPLITS_PER_GROUP; ++i) elements[i] = zero_chunk();
    }
    return header.x && header.y && half_published(0) && (!has_second_half() || half_published(HALF));
  }

  DISTMK_FN float combine() const {
    const uint32_t lane = threadIdx.x % 32, own_group = lane / ELEMENT_LANES;
    const float own_max = lane < num_splits ? __uint_as_float(header.x) : -INFINITY;
    float weight = lane_weight<32>(own_max);  // finite, because a row sees its own position
    weight = __fdividef(weight, warp_sum(__uint_as_float(header.y) * weight));
    float acc[4] = {};
    const auto add_half = [&](uint32_t first) {
#pragma unroll
      for (uint32_t i = first; i < first + HALF; ++i) {
        const float w = __shfl_sync(~0u, weight, split(i));
        const uint32_t bits[4] = {elements[i].x, elements[i].y, elements[i].z, elements[i].w};
#pragma unroll
        for (uint32_t e = 0; e < 4; ++e) acc[e] += __uint_as_float(bits[e]) * w;
      }
    };
    add_half(0);
    if (has_second_half()) add_half(HALF);
#pragma unroll
    for (float& sum : acc)
      for (uint32_t step = ELEMENT_LANES; step < 32; step <<= 1) sum += __shfl_xor_sync(~0u, sum, step);
    return own_group == 0 ? acc[0] : own_group == 1 ? acc[1] : own_group == 2 ? acc[2] : acc[3];
  }

  // Zeroes the partials (Lamport) once all lanes have read them.
  DISTMK_FN void reset() const {
    __syncwarp();
    const uint32_t lane = threadIdx.x % 32;
    if (lane < num_splits) lamport_reset(header_at(lane));
#pragma unroll
    for (uint32_t i = 0; i < SPLITS_PER_GROUP; ++i)
      if (split(i) < num_splits && first_element() < num_elements)
        lamport_reset(elements_at(split(i), first_element()));
  }
};

// A warp combines one slice of four rows with up to two splits each: eight lanes per row, four elements per lane. No
// lane needs another lane's data.
struct FourRowCombine {
  static constexpr uint32_t ROWS = 32 / ELEMENT_LANES, MAX_SPLITS = 2;
  float* partials;      // partials of this lane's row
  uint32_t num_splits;  // splits of this lane's row
  float2 headers[MAX_SPLITS];
  uint4 elements[MAX_SPLITS];

  DISTMK_FN static uint32_t row() { return threadIdx.x % 32 / ELEMENT_LANES; }
  DISTMK_FN static uint32_t first_element() { return threadIdx.x % ELEMENT_LANES * 4; }

  // Whether everything that was loaded has been published.
  DISTMK_FN bool load() {
#pragma unroll
    for (uint32_t s = 0; s < MAX_SPLITS; ++s) {
      const float* of_split = partials + (s < num_splits ? s : 0) * PARTIAL_FLOATS;
      headers[s] = poll_load(reinterpret_cast<const float2*>(of_split));
      elements[s] = poll_load(reinterpret_cast<const uint4*>(of_split + PARTIAL_HEADER_FLOATS + first_element()));
    }
    bool all = true;
#pragma unroll
    for (uint32_t s = 0; s < MAX_SPLITS; ++s)
      all = all && __float_as_uint(headers[s].x) && __float_as_uint(headers[s].y) && words_published(elements[s]);
    return all;
  }

  DISTMK_FN void combine(float (&combined)[4]) const {
    static_assert(MAX_SPLITS == 2, "");
    const float max_0 = headers[0].x, max_1 = num_splits == 2 ? headers[1].x : -INFINITY, m = fmaxf(max_0, max_1);
    const float a = combine_weight(max_0, m), b = combine_weight(max_1, m);
    const float scale = normalizer(headers[0].y * a + headers[1].y * b);
    const uint32_t first[4] = {elements[0].x, elements[0].y, elements[0].z, elements[0].w};
    const uint32_t second[4] = {elements[1].x, elements[1].y, elements[1].z, elements[1].w};
#pragma unroll
    for (uint32_t e = 0; e < 4; ++e)
      combined[e] = __uint_as_float(first[e]) * (a * scale) + __uint_as_float(second[e]) * (b * scale);
  }

  // Zeroes the partials. Only lanes whose row exists call it.
  DISTMK_FN void reset() const {
    for (uint32_t s = 0; s < num_splits; ++s) {
      float* of_split = partials + s * PARTIAL_FLOATS;
      if (first_element() == 0) lamport_reset(reinterpret_cast<uint4*>(of_split));
      lamport_reset(reinterpret_cast<uint4*>(of_split + PARTIAL_HEADER_FLOATS + first_element()));
    }
  }
};

// Waits for the partials, or prepares to poll them. False: the launch was over before they were there.
DISTMK_FN bool await_partials(Context& context, const CombineArgs& args) {
  if (!args.polls_partials) return context.inputs_ready();
  context.begin_polling();
  return true;
}

// Combines all rows, if no row has more than FourRowCombine::MAX_SPLITS splits. `splits_of_row`: in lane r, the number
// of splits of row r.
DISTMK_FN void combine_four_rows(Context& context, const CombineArgs& args, const Batch& batch, uint32_t splits_of_row,
                                 const LamportVector& out) {
  const auto num_rows = static_cast<uint32_t>(batch.num_rows);
  const uint32_t num_quads = (num_rows + FourRowCombine::ROWS - 1) / FourRowCombine::ROWS;
  for (uint32_t i = threadIdx.x / 32; i < num_quads * args.num_slices; i += NUM_WARPS) {
    const uint32_t index = i % args.num_slices,
                   own_row = i / args.num_slices * FourRowCombine::ROWS + FourRowCombine::row();
    const uint32_t row = min(own_row, num_rows - 1);
    const CombineSlice slice(args, index);
    FourRowCombine rows;
    rows.partials = context.at<float>(args.partials) + index * slice_floats(args.max_kv_splits) +
                    partial_begin(row, 0, args.max_kv_splits);
    rows.num_splits = __shfl_sync(~0u, splits_of_row, row);
    if (!await_partials(context, args)) return;
    context.poll(args.polls_partials, [&] { return rows.load(); });
    context.inputs_polled();
    float combined[4];
    rows.combine(combined);
    __syncwarp();  // all lanes have read the partials that are reset below
    if (own_row >= num_rows) continue;
    out.publish_four(uint64_t{row} * args.out_stride + slice.head * args.head_dim + slice.begin + rows.first_element(),
                     combined);
    if (args.polls_partials) rows.reset();
  }
}

}  // namespace attention

DISTMK_FN void body_combine(Context& context, const CombineArgs& args) {
  using namespace attention;
  const Batch& batch = *context.batch(args.batch);
  if (fuses_combine(args, batch.num_rows, batch.runs[0])) return context.inputs_polled();
  const Splits splits(args, batch);
  const LamportVector out{context.at<__nv_bfloat16>(args.out), context.at<__nv_bfloat16>(args.lamport_reset)};
  const uint32_t lane = threadIdx.x % 32, splits_of_row = lane < batch.num_rows ? splits.of(run_of(batch, lane)) : 1;
  // Never with fixed splits: whether a row is combined in fours would depend on the other rows.
  const bool in_fours =
      !has_fixed_splits(args) && args.head_dim % COMBINE_SLICE == 0 && out.takes_four(args.out_stride);
  if (in_fours && __all_sync(~0u, splits_of_row <= FourRowCombine::MAX_SPLITS)) {
    combine_four_rows(context, args, batch, splits_of_row, out);
    return context.inputs_polled();  // for warps that had no row
  }
  for (uint32_t i = threadIdx.x / 32; i < batch.num_rows * args.num_slices; i += NUM_WARPS) {
    const uint32_t row = i / args.num_slices, index = i % args.num_slices;
    const CombineSlice slice(args, index);
    SliceCombine of_slice;
    of_slice.partials = context.at<float>(args.partials) + index * slice_floats(args.max_kv_splits) +
                        partial_begin(row, 0, args.max_kv_splits);
    of_slice.num_splits = splits.of(run_of(batch, row));
    of_slice.num_elements = slice.end - slice.begin;
    if (!await_partials(context, args)) return;
    context.poll(args.polls_partials, [&] { return of_slice.load(); });
    context.inputs_polled();
    const float value = of_slice.combine();
    const uint32_t e = SliceCombine::own_element();
    if (e < of_slice.num_elements)
      out.store(uint64_t{row} * args.out_stride + slice.head * args.head_dim + slice.begin + e, value);
    if (args.polls_partials) of_slice.reset();
  }
  context.inputs_polled();
}

DISTMK_FN void reset_stale_rows(const Context& context, const CombineArgs& args, const Batch& batch) {
  DISTMK_NO_UNROLL
  for (uint32_t i = 0; i < args.num_slices; ++i) {
    const CombineSlice slice(args, i);
    auto* columns = context.at<__nv_bfloat16>(args.lamport_reset) + slice.head * args.head_dim + slice.begin;
    reset_rows(context, batch, columns, slice.end - slice.begin, args.out_stride);
  }
}

}  // namespace distmk
