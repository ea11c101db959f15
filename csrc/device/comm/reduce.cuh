// The sum task, the reduce half of an all-reduce: adds the blocks that all ranks have pushed to dst, in rank order.
#pragma once
#include "device/comm/lamport.cuh"

namespace distmk {

// Whether the body polls its blocks' elements instead of waiting for events.
DISTMK_FN bool sum_polls(const RankState& state, const SumArgs& args) { return args.polls_blocks && !state.transport; }

// A block is [rows, num_cols], with block_gap elements between its rows.
//   dst[row, i] = (accumulates ? dst[row, i] : 0) + sum over b of blocks[b, row, i], in float32, and its bf16 copy.
// IN_FLIGHT blocks are loaded before the first is added. Further blocks take another trip to memory.
DISTMK_FN void body_sum(Context& context, const SumArgs& args) {
  constexpr uint32_t IN_FLIGHT = 4;
  const uint32_t count = rows_of(context.batch(args.batch)) * args.num_cols, num_blocks = args.num_blocks;
  auto* blocks = context.at<float>(args.blocks);
  const uint64_t step = args.block_stride / sizeof(float);
  auto* dst = context.at<float>(args.dst);
  const LamportVector out_bf16{context.at<__nv_bfloat16>(args.out_bf16), context.at<__nv_bfloat16>(args.lamport_reset)};
  const bool polls = sum_polls(context.rank_state, args);
  if (polls)
    context.begin_polling();
  else if (!context.inputs_ready())
    return;
#pragma unroll 1
  for (uint32_t i = context.team.index; i < count; i += context.team.size) {
    const uint32_t row = i < args.num_cols ? 0 : i / args.num_cols,
                   column = i - row * args.num_cols;  // divisions are slow
    float* out = dst + uint64_t{row} * args.dst_stride + column;
    const uint32_t in_block = opaque(i + row * args.block_gap);          // opaque: computed before the elements arrive
    const uint32_t place = opaque(row * args.out_bf16_stride + column);  // opaque for the same reason
    float sum = args.accumulates ? __ldcg(out) : 0.0f;
#pragma unroll 1
    for (uint32_t first = 0; first < num_blocks; first += IN_FLIGHT) {
      float* const element = blocks + first * step + in_block;
      const uint32_t left = num_blocks - first;
      float value[IN_FLIGHT];
      context.poll(polls, [&] {
        bool all = true;
#pragma unroll
        for (uint32_t b = 0; b < IN_FLIGHT; ++b)
          value[b] = b < left ? poll_load(element + b * step) : lamport_value(0.0f);
#pragma unroll
        for (uint32_t b = 0; b < IN_FLIGHT; ++b) all &= is_published(value[b]);
        return all;
      });
#pragma unroll
      for (uint32_t b = 0; b < IN_FLIGHT; ++b) sum += value[b];
    }
    if (out_bf16) out_bf16.store(place, sum);  // first, because other workers poll it
    *out = sum;
#pragma unroll 1
    for (uint32_t b = 0; args.polls_blocks && b < num_blocks; ++b) lamport_reset(blocks + b * step + in_block);
  }
  if (polls) context.inputs_polled();
}

DISTMK_FN void reset_stale_rows(const Context& context, const SumArgs& args, const Batch& batch) {
  reset_columns<__nv_bfloat16>(context, args, batch, args.num_cols, args.out_bf16_stride);
}

}  // namespace distmk
