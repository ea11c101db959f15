// The embedding lookup on the host (device/linear/embed.cuh says what it computes).
#include "host/simd.h"
#include "runtime/context.h"

namespace distmk {

void body_embed(Context& context, const EmbedArgs& args) {
  const auto& batch = *context.at<Batch>(args.batch);
  const auto* table = context.at<uint16_t>(args.table);
  const bool push = args.epilogue == static_cast<uint32_t>(Epilogue::PUSH);
  const uint64_t stride = push ? args.n : args.out_stride;
  float* out = context.at<float>(args.out);
  for (uint32_t row = 0; row < batch.num_rows; ++row) {
    const auto token = static_cast<uint32_t>(batch.rows[row].token);
    if (token >= args.first_token && token < args.last_token)
      simd::from_bf16(out + row * stride, table + uint64_t{token - args.first_token} * args.k + args.col_begin, args.n);
    else
      simd::clear(out + row * stride, 1, stride, args.n);
  }
  simd::to_bf16_rows(context.at<uint16_t>(args.out_bf16), args.out_bf16_stride, out, stride, batch.num_rows, args.n);
  simd::clear(context.at<uint16_t>(args.reset), batch.num_rows, args.out_bf16_stride, args.n);
  if (!push) return;
  for (uint32_t rank = 0; rank < context.num_ranks(); ++rank)
    if (rank != context.rank()) context.push(rank, args.out, out, uint64_t{batch.num_rows} * args.n * sizeof(float));
}

}  // namespace distmk
