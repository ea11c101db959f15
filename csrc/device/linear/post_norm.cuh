// The RMSNorm behind a row-parallel projection: x[n, c] += y[n, c] / rms(y[n]) * weight[c], and its bf16 copy. n:
// token, c: columns of this task. Every task reads whole rows of y, for their root mean square.
#pragma once
#include "device/attention/lse.cuh"
#include "device/comm/lamport.cuh"
#include "device/linear/epilogue.cuh"

namespace distmk {

DISTMK_FN void body_post_norm(Context& context, const PostNormArgs& args) {
  const uint32_t num_rows = rows_of(context.batch(args.batch));
  const auto* y = context.at<float>(args.y);
#pragma unroll 1
  for (uint32_t row = 0; row < num_rows; ++row) {
    float squares = 0.0f;
#pragma unroll 8
    for (uint32_t i = context.team.index; i < args.k; i += NUM_CONSUMERS) {
      const float value = __ldcg(y + uint64_t{row} * args.y_stride + i);
      squares += value * value;
    }
    squares = attention::warp_sum(squares);
    if (threadIdx.x % 32 == 0) shared().squares[row][threadIdx.x / 32] = squares;
  }
  context.team.sync();
  const auto* weight = context.at<float>(args.weight);
  auto* x = context.at<float>(args.x);
  const LamportVector out_bf16{context.at<__nv_bfloat16>(args.out_bf16), context.at<__nv_bfloat16>(args.reset)};
#pragma unroll 1
  for (uint32_t row = 0; row < num_rows; ++row) {
    const float scale = linear::norm_scale(args, row);
    for (uint32_t i = context.team.index; i < args.n; i += NUM_CONSUMERS) {
      float* out = x + uint64_t{row} * args.x_stride + i;
      const float value = __ldcg(y + uint64_t{row} * args.y_stride + args.col_begin + i);
      const float sum = __ldcg(out) + value * scale * weight[i];
      if (out_bf16) out_bf16.store(uint64_t{row} * args.out_bf16_stride + i, sum);  // first, as other workers poll it
      *out = sum;
    }
  }
}

DISTMK_FN void reset_stale_rows(const Context& context, const PostNormArgs& args, const Batch& batch) {
  reset_columns<__nv_bfloat16>(context, args, batch, args.n, args.out_bf16_stride);
}

}  // namespace distmk
