// The embedding lookup, vocabulary-parallel: out[n, c] = table[token id of n, c] in float32, for token n and columns c
// of this task. It is zero if another rank has the token's row, so the sum over ranks is the lookup. PUSH stores to
// every rank. STORE stores to this rank, with a bf16 copy if out_bf16 is given.
#pragma once
#include "device/comm/lamport.cuh"

namespace distmk {

DISTMK_FN void body_embed(Context& context, const EmbedArgs& args) {
  const Batch* batch = context.batch(args.batch);
  const uint32_t num_rows = rows_of(batch);
  const auto* table = context.at<__nv_bfloat16>(args.table);
  const LamportVector out_bf16{context.at<__nv_bfloat16>(args.out_bf16), context.at<__nv_bfloat16>(args.lamport_reset)};
  const bool push = args.epilogue == static_cast<uint32_t>(Epilogue::PUSH);
  for (uint32_t row = 0; row < num_rows; ++row) {
    const auto token = static_cast<uint32_t>(batch->rows[row].token);
    const bool in_shard = token >= args.first_token && token < args.last_token;
    const __nv_bfloat16* embedding = table + uint64_t{token - args.first_token} * args.k + args.col_begin;
    for (uint32_t i = context.team.index; i < args.num_cols; i += context.team.size) {
      const float value = in_shard ? __bfloat162float(embedding[i]) : 0.0f;
      if (!push) {
        context.at<float>(args.out)[uint64_t{row} * args.out_stride + i] = value;
        if (out_bf16) out_bf16.store(uint64_t{row} * args.out_bf16_stride + i, value);
        continue;
      }
      for (uint32_t rank = 0; rank < context.num_ranks(); ++rank)
        if (float* out = context.peer<float>(rank, args.out)) publish(out + row * args.num_cols + i, value);
    }
  }
  if (push) context.push_remote(args.out, uint64_t{num_rows} * args.num_cols * sizeof(float));
}

DISTMK_FN void reset_stale_rows(const Context& context, const EmbedArgs& args, const Batch& batch) {
  reset_columns<__nv_bfloat16>(context, args, batch, args.num_cols, args.out_bf16_stride);
}

}  // namespace distmk
