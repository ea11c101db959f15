#include <cmath>

#include "host/simd.h"
#include "runtime/splits.h"

namespace distmk {

namespace {

// Splits are taken in order, so the result does not depend on who finished when.
void merge_slice(uint16_t* __restrict out, const float* __restrict parts, uint32_t num_splits, uint32_t num_elements) {
  float max = -INFINITY, total = 0.0f;
  for (uint32_t s = 0; s < num_splits; ++s)
    if (parts[s * PARTIAL_FLOATS] > max) max = parts[s * PARTIAL_FLOATS];
  float sums[COMBINE_SLICE] = {};
  for (uint32_t s = 0; s < num_splits; ++s) {
    const float* partials = parts + s * PARTIAL_FLOATS;
    const float weight = std::exp(partials[0] - max);  // 0 where the row saw no position
    total += weight * partials[1];
    for (uint32_t d = 0; d < num_elements; ++d) sums[d] += weight * partials[PARTIAL_HEADER_FLOATS + d];
  }
  const float scale = 1.0f / total;
  for (uint32_t d = 0; d < num_elements; ++d) out[d] = simd::to_bf16(sums[d] * scale);
}

}  // namespace

void body_combine(Context& context, const CombineArgs& args) {
  const auto& batch = *context.at<Batch>(args.batch);
  if (fuses_combine(args, batch.num_rows, batch.runs[0])) return;
  float* parts = context.at<float>(args.partials);
  auto *out = context.at<uint16_t>(args.out), *reset = context.at<uint16_t>(args.reset);
  const Splits splits(args, batch);
  for (uint32_t row = 0; row < batch.num_rows; ++row)
    for (uint32_t i = 0; i < args.num_slices; ++i) {
      const CombineSlice slice(args, i);
      const uint64_t begin = uint64_t{row} * args.out_stride + uint64_t{slice.head} * args.head_dim + slice.begin;
      const uint32_t num_splits = splits.of(run_of(batch, row)), num_elements = slice.end - slice.begin;
      float* of_row = parts + i * slice_floats(args.max_splits) + partial_begin(row, 0, args.max_splits);
      merge_slice(out + begin, of_row, num_splits, num_elements);
      simd::clear(reset ? reset + begin : nullptr, 1, 0, num_elements);
      if (args.polls) simd::clear(of_row, num_splits, PARTIAL_FLOATS, PARTIAL_FLOATS);
    }
}

}  // namespace distmk
