// The RMSNorm after a row-parallel projection: x[n, c] += y[n, c] / rms(y[n]) * weight[c], and its bf16 copy, for token
// n and columns c of this task. Every task reads whole rows of y for their root mean square.
#pragma once
#include "device/attention/lse.cuh"
#include "device/comm/lamport.cuh"
#include "device/core/vectors.cuh"
#include "device/linear/epilogue.cuh"

namespace distmk {
namespace linear {

// Writes each warp's sums of squares of ROWS rows from `row` on to shared memory. Each thread has several loads of each
// row in flight. No load is conditional, because the compiler would then wait for each load before the next.
template <class Vector, uint32_t ROWS>
DISTMK_FN void keep_squares(const PostNormArgs& args, const float* y, uint32_t row) {
  constexpr uint32_t IN_FLIGHT = 4;
  const uint32_t num_vectors = args.k / (sizeof(Vector) / sizeof(float));
  float squares[ROWS] = {};
#pragma unroll 1
  for (uint32_t first = threadIdx.x; first < num_vectors; first += IN_FLIGHT * NUM_CONSUMERS) {
    Vector loaded[ROWS][IN_FLIGHT];
#pragma unroll
    for (uint32_t r = 0; r < ROWS; ++r)
#pragma unroll
      for (uint32_t i = 0; i < IN_FLIGHT; ++i)
        loaded[r][i] = __ldcg(reinterpret_cast<const Vector*>(y + uint64_t{row + r} * args.y_stride) +
                              min(first + i * NUM_CONSUMERS, num_vectors - 1));
#pragma unroll
    for (uint32_t r = 0; r < ROWS; ++r)
#pragma unroll
      for (uint32_t i = 0; i < IN_FLIGHT; ++i)
        if (first + i * NUM_CONSUMERS < num_vectors) squares[r] += square(loaded[r][i]);
  }
#pragma unroll
  for (uint32_t r = 0; r < ROWS; ++r) {
    squares[r] = attention::warp_sum(squares[r]);
    if (threadIdx.x % 32 == 0) shared().squares[row + r][threadIdx.x / 32] = squares[r];
  }
}
template <class Vector>
DISTMK_FN void keep_squares(const PostNormArgs& args, const float* y, uint32_t num_rows) {
  constexpr uint32_t AT_ONCE = 4;
  uint32_t row = 0;
#pragma unroll 1
  for (; row + AT_ONCE <= num_rows; row += AT_ONCE) keep_squares<Vector, AT_ONCE>(args, y, row);
#pragma unroll 1
  for (; row < num_rows; ++row) keep_squares<Vector, 1>(args, y, row);
}

// The elements that a thread stores, one after another. A warp takes 32 columns of a row at a time.
struct PostNormElement {
  uint32_t row = 0, chunk = threadIdx.x / 32, col = 0;
  float x = 0.0f, y = 0.0f, weight = 0.0f;

  // Loads the element at this place, or at the warp's next one if the row has ended. False: the warp has no more
  // elements.
  DISTMK_FN bool load(const Context& context, const PostNormArgs& args, uint32_t num_rows) {
    for (const uint32_t num_chunks = (args.num_cols + 31) / 32; chunk >= num_chunks; chunk -= num_chunks) ++row;
    if (row >= num_rows) return false;
    col = 32 * chunk + threadIdx.x % 32;
    const uint32_t known = min(col, args.num_cols - 1);
    x = __ldcg(context.at<float>(args.x) + uint64_t{row} * args.x_stride + known);
    y = __ldcg(context.at<float>(args.y) + uint64_t{row} * args.y_stride + args.col_begin + known);
    weight = context.at<float>(args.weight)[known];
    return true;
  }
};

}  // namespace linear

DISTMK_FN void body_post_norm(Context& context, const PostNormArgs& args) {
  const uint32_t num_rows = rows_of(context.batch(args.batch));
  const auto* rows = context.at<float>(args.y);
  linear::PostNormElement element;
  bool has_element = element.load(context, args, num_rows);  // its loads overlap with those of y's rows
  if (is_aligned(rows) && (args.k | args.y_stride) % 4 == 0)
    linear::keep_squares<float4>(args, rows, num_rows);
  else
    linear::keep_squares<float>(args, rows, num_rows);
  context.team.sync();
  const LamportVector out_bf16{context.at<__nv_bfloat16>(args.out_bf16), context.at<__nv_bfloat16>(args.lamport_reset)};
  while (has_element) {
    const linear::PostNormElement at = element;
    element.chunk += NUM_WARPS;
    has_element = element.load(context, args, num_rows);
    if (at.col >= args.num_cols) continue;
    const float sum = at.x + at.y * linear::norm_scale(args, at.row) * at.weight;
    // The bf16 copy comes first, because other workers poll it.
    if (out_bf16) out_bf16.store(uint64_t{at.row} * args.out_bf16_stride + at.col, sum);
    context.at<float>(args.x)[uint64_t{at.row} * args.x_stride + at.col] = sum;
  }
}

DISTMK_FN void reset_stale_rows(const Context& context, const PostNormArgs& args, const Batch& batch) {
  reset_columns<__nv_bfloat16>(context, args, batch, args.num_cols, args.out_bf16_stride);
}

}  // namespace distmk
