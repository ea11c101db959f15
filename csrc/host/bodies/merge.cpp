#include <cmath>

#include "host/simd.h"
#include "runtime/splits.h"

namespace distmk {

namespace {

constexpr uint32_t PART_HEADER = 2;  // floats before a partial's accumulator: maximum and sum

// Splits are taken in order, so the result does not depend on who finished when.
void merge_slice(uint16_t* __restrict out, const float* __restrict parts, uint32_t num_splits, uint32_t head_dim,
                 uint32_t begin, uint32_t end) {
  const uint64_t stride = PART_HEADER + head_dim;
  float max = -INFINITY, total = 0.0f;
  for (uint32_t s = 0; s < num_splits; ++s)
    if (parts[s * stride] > max) max = parts[s * stride];
  float sums[MERGE_SLICE] = {};
  for (uint32_t s = 0; s < num_splits; ++s) {
    const float* part = parts + s * stride;
    const float weight = std::exp(part[0] - max);  // 0 where the row saw no position
    total += weight * part[1];
    for (uint32_t d = begin; d < end; ++d) sums[d - begin] += weight * part[PART_HEADER + d];
  }
  const float scale = 1.0f / total;
  for (uint32_t d = begin; d < end; ++d) out[d] = simd::to_bf16(sums[d - begin] * scale);
}

}  // namespace

void body_merge(Context& context, const MergeArgs& args) {
  const auto& batch = *context.at<Batch>(args.batch);
  const float* parts = context.at<float>(args.part);
  const uint64_t row_floats = uint64_t{args.max_splits} * (PART_HEADER + args.head_dim);
  auto *out = context.at<uint16_t>(args.out), *cleared = context.at<uint16_t>(args.cleared);
  const Splits splits(args, batch);
  for (uint32_t row = 0; row < batch.num_rows; ++row)
    for (uint32_t i = 0; i < args.num_slices; ++i) {
      const MergeSlice slice(args, i);
      const uint64_t row_begin = uint64_t{row} * args.out_stride + uint64_t{slice.head} * args.head_dim;
      merge_slice(out + row_begin, parts + (uint64_t{slice.head} * MAX_ROWS + row) * row_floats,
                  splits.of(run_of(batch, row)), args.head_dim, slice.begin, slice.end);
      simd::clear(cleared ? cleared + row_begin + slice.begin : nullptr, 1, 0, slice.end - slice.begin);
    }
}

}  // namespace distmk
