// Communication tasks on the host: put, and the sum of an all-reduce.
#include "host/bodies/rows.h"
#include "runtime/context.h"

namespace distmk {

using namespace simd;

void body_put(Context& context, const PutArgs& args) {
  const void* src = context.at<void>(args.src);
  const uint64_t num_bytes = rows_of(context.batch(args.batch)) * args.num_bytes;
  if (args.dst_rank == context.rank())
    copy_bytes(Team{}, context.at<void>(args.dst), src, num_bytes);
  else
    context.push(args.dst_rank, args.dst, src, num_bytes);
}

// Adds the blocks in the order of their numbers, not of their arrival, so that every rank gets the same bits.
void body_sum(Context& context, const SumArgs& args) {
  const uint32_t num_rows = rows_of(context.batch(args.batch));
  const uint64_t step = args.block_stride / sizeof(float), pitch = args.num_cols + args.block_gap;
  float* blocks = context.at<float>(args.blocks);
  float* dst = context.at<float>(args.dst);
  for (uint32_t row = 0; row < num_rows; ++row) {
    const float* in = blocks + row * pitch;
    float* out = dst + uint64_t{row} * args.dst_stride;
    if (!args.accumulates) memcpy(out, in, args.num_cols * sizeof(float));
    for (uint32_t b = args.accumulates ? 0 : 1; b < args.num_blocks; ++b) add_row(out, in + b * step, args.num_cols);
    round_row(context, args, row, out, args.num_cols);
  }
  clear(context.at<uint16_t>(args.lamport_reset), num_rows, args.out_bf16_stride, args.num_cols);
  for (uint32_t b = 0; args.polls_blocks && b < args.num_blocks; ++b)
    clear(blocks + b * step, num_rows, pitch, args.num_cols);
}

}  // namespace distmk
