#include "host/simd.h"
#include "runtime/context.h"

namespace distmk {

void body_embed(Context& context, const EmbedArgs& args) {
  const auto& batch = *context.at<Batch>(args.batch);
  const auto* table = context.at<uint16_t>(args.table);
  const bool push = args.epilogue == static_cast<uint32_t>(Epilogue::PUSH);
  const uint64_t stride = push ? args.n : args.out_stride;
  float* block = context.at<float>(args.out);
  auto* out_bf16 = context.at<uint16_t>(args.out_bf16);
  for (uint32_t r = 0; r < batch.num_rows; ++r) {
    float* out = block + r * stride;
    const auto token = static_cast<uint32_t>(batch.rows[r].token);
    if (token >= args.first_token && token < args.last_token)
      simd::from_bf16(out, table + uint64_t{token - args.first_token} * args.k + args.col_begin, args.n);
    else
      memset(out, 0, args.n * sizeof(float));
    if (out_bf16) simd::to_bf16(out_bf16 + uint64_t{r} * args.out_bf16_stride, out, args.n);
  }
  simd::clear(context.at<uint16_t>(args.reset), batch.num_rows, args.out_bf16_stride, args.n);
  if (!push) return;
  for (uint32_t rank = 0; rank < context.num_ranks(); ++rank)
    if (rank != context.rank()) context.push(rank, args.out, block, uint64_t{batch.num_rows} * args.n * sizeof(float));
}

}  // namespace distmk
