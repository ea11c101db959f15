// What becomes of what the warps have found of a query, and where it goes.
#pragma once
#include "device/attention/kv_tile.cuh"

namespace distmk {
namespace attention {

constexpr uint32_t PART_LANES = COMBINE_SLICE / 4;  // whose elements are a slice of a query's result

// Where this lane's four elements of a query's result lie, behind a header. Asked for before the warps meet: some have
// nothing else to do.
template <class W>
DISTMK_FN void* part_of(const W& w, uint32_t query) {
  const uint32_t lane = w.lane(), slices = (w.head_dim() + COMBINE_SLICE - 1) / COMBINE_SLICE;
  if (w.fuses_combine())
    return w.fused_partial_at(w.args.fused_partials, query, w.instance.split) + FUSED_PARTIAL_HEADER + 4 * lane;
  const uint32_t row = w.row_of(query), slice = (w.first_head + query - row * w.num_heads) * slices + lane / PART_LANES;
  return w.floats(w.args.partials) +
         partial_of_slice(slice, w.run.row_begin + row, w.instance.split, w.args.max_splits) + PARTIAL_HEADER_FLOATS +
         lane % PART_LANES * 4;
}

// Merges the warps' results for a query and writes them out; a warp a query, four elements a lane, of which each weighs
// what one of the warps has found. That of warps that had no chunk weighs nothing, and some of it is not read.
template <class W>
DISTMK_FN void write_query(const W& w, uint32_t index, void* out) {
  constexpr uint32_t AT_ONCE = NUM_WARPS / 2;
  const uint32_t lane = w.lane();
  const auto found_by = [&](uint32_t turn) { return w.combined(turn, index); };
  const float2 found = *reinterpret_cast<const float2*>(found_by(lane % NUM_WARPS) + MAX_HEAD_DIM);
  float maximum = found.x;
  for (uint32_t step = 1; step < NUM_WARPS; step <<= 1) maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, step));
  const float weight = __expf(found.x - (maximum > -INFINITY ? maximum : 0.0f));
  float sum = found.y * weight;
  for (uint32_t step = 1; step < NUM_WARPS; step <<= 1) sum += __shfl_xor_sync(~0u, sum, step);
  float4 acc = {0, 0, 0, 0};
#pragma unroll
  for (uint32_t first = 0; first < NUM_WARPS; first += AT_ONCE) {
    if (first >= w.num_chunks()) break;
#pragma unroll
    for (uint32_t turn = first; turn < first + AT_ONCE; ++turn) {
      const float4 more = *reinterpret_cast<const float4*>(found_by(turn) + 4 * lane);
      const float share = __shfl_sync(~0u, weight, turn);
      acc.x += more.x * share, acc.y += more.y * share, acc.z += more.z * share, acc.w += more.w * share;
    }
  }
  if (4 * lane >= w.head_dim()) return;
  if (w.fuses_combine()) {
    const float scale = __fdividef(1.0f, sum);
    const uint32_t pairs[2] = {pack_bf16(acc.x * scale, acc.y * scale), pack_bf16(acc.z * scale, acc.w * scale)};
    publish_store(static_cast<uint2*>(out), {lamport_pair(pairs[0]), lamport_pair(pairs[1])});
    // Last: who waits looks at it alone.
    if (lane == 0)
      publish(reinterpret_cast<float*>(static_cast<__nv_bfloat16*>(out) - FUSED_PARTIAL_HEADER), maximum + __logf(sum));
    return;
  }
  if (lane % PART_LANES == 0) publish_four(static_cast<float*>(out) - PARTIAL_HEADER_FLOATS, {maximum, sum, 0, 0});
  publish_four(static_cast<float*>(out), acc);
}

// Leaves zero what splits of a lone row may have left a turn before, as many as there were then: a warp a head.
template <class W>
DISTMK_FN void reset_fused_partials(const W& w) {
  const uint32_t lane = w.lane();
  if (!w.args.reset || w.instance.run != 0 || 4 * lane >= w.head_dim()) return;
#pragma unroll 1
  for (uint32_t query = threadIdx.x / 32; query < w.num_heads; query += NUM_WARPS)
#pragma unroll 1
    for (uint32_t split = w.instance.split; split < max_fused_splits(w.args.max_splits);
         split += w.instance.num_splits) {
      __nv_bfloat16* out = w.fused_partial_at(w.args.reset, query, split);
      if (lane == 0) publish_store(reinterpret_cast<float*>(out), 0.0f);
      publish_store(reinterpret_cast<uint2*>(out + FUSED_PARTIAL_HEADER) + lane, {0, 0});
    }
}

}  // namespace attention
}  // namespace distmk
