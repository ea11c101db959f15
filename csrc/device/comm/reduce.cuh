// The second half of an all-reduce: sums the blocks that all ranks have pushed, in rank order.
#pragma once
#include "device/comm/lamport.cuh"
#include "runtime/context.h"

namespace distmk {

DISTMK_FN uint32_t rows_of(const Batch* batch) { return batch ? batch->num_rows : 1; }

// Whether a sum takes its elements as they arrive: having seen them it knows as much as if it had waited.
DISTMK_FN bool sum_arrives(const RankState& state, const SumArgs& args) { return args.arriving && !state.far; }

// All blocks of up to IN_FLIGHT are on their way before the first is added; for more it is a trip more.
DISTMK_FN void body_sum(Context& context, const SumArgs& args) {
  constexpr uint32_t IN_FLIGHT = 4;
  const uint32_t count = rows_of(context.batch(args.batch)) * args.num, num_blocks = args.num_blocks;
  auto* blocks = context.at<float>(args.blocks);
  const uint64_t step = args.block_stride / sizeof(float);
  auto* dst = context.at<float>(args.dst);
  const ArrivingVector rounded{context.at<__nv_bfloat16>(args.rounded), context.at<__nv_bfloat16>(args.cleared)};
  const bool arriving = sum_arrives(context.rank_state, args);
  if (arriving)
    context.look_for_inputs();
  else if (!context.inputs_ready())
    return;
#pragma unroll 1
  for (uint32_t i = context.team.index; i < count; i += context.team.size) {
    const uint32_t row = i < args.num ? 0 : i / args.num, column = i - row * args.num;  // divisions are slow
    float* out = dst + uint64_t{row} * args.dst_stride + column;
    const uint32_t place = opaque(row * args.rounded_stride + column);  // here, where nobody waits for it yet
    float sum = args.add ? __ldcg(out) : 0.0f;
#pragma unroll 1
    for (uint32_t first = 0; first < num_blocks; first += IN_FLIGHT) {
      float* const element = blocks + first * step + i;
      const uint32_t left = num_blocks - first;
      float value[IN_FLIGHT];
      context.look(arriving, [&] {
        bool all = true;
#pragma unroll
        for (uint32_t b = 0; b < IN_FLIGHT; ++b) value[b] = b < left ? load_arriving(element + b * step) : -0.0f;
#pragma unroll
        for (uint32_t b = 0; b < IN_FLIGHT; ++b) all &= __float_as_uint(value[b]) != 0;
        return all;
      });
#pragma unroll
      for (uint32_t b = 0; b < IN_FLIGHT; ++b) sum += value[b];
    }
    if (rounded) rounded.store(place, sum);  // first: others look for it
    *out = sum;
#pragma unroll 1
    for (uint32_t b = 0; args.arriving && b < num_blocks; ++b) store_arriving(blocks + b * step + i, 0.0f);
  }
  if (arriving) context.inputs_found();
}

}  // namespace distmk
