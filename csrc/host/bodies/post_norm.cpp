// The RMSNorm behind a row-parallel projection, on the host (device/linear/post_norm.cuh says what it computes).
#include <cmath>

#include "host/simd.h"
#include "runtime/context.h"

namespace distmk {

void body_post_norm(Context& context, const PostNormArgs& args) {
  const uint32_t num_rows = rows_of(context.batch(args.batch));
  const float* weight = context.at<float>(args.weight);
  float* x = context.at<float>(args.x);
  for (uint32_t row = 0; row < num_rows; ++row) {
    const float* y = context.at<float>(args.y) + uint64_t{row} * args.y_stride;
    const float scale = 1.0f / std::sqrt(simd::sum_squares(y, args.k) / static_cast<float>(args.k) + args.eps);
    float* out = x + uint64_t{row} * args.x_stride;
    for (uint32_t i = 0; i < args.n; ++i) out[i] += y[args.col_begin + i] * scale * weight[i];
  }
  simd::to_bf16_rows(context.at<uint16_t>(args.out_bf16), args.out_bf16_stride, x, args.x_stride, num_rows, args.n);
  simd::clear(context.at<uint16_t>(args.reset), num_rows, args.out_bf16_stride, args.n);
}

}  // namespace distmk
