#include <cmath>

#include "host/simd.h"
#include "runtime/splits.h"

namespace distmk {

namespace {

constexpr uint32_t PART_HEADER = 2;  // floats before a partial's accumulator: maximum and sum

// Splits are taken in order, so the result does not depend on who finished when.
void merge_row(float* __restrict out, const float* __restrict parts, uint32_t num_splits, uint32_t head_dim) {
  const uint64_t stride = PART_HEADER + head_dim;
  float max = -INFINITY, total = 0.0f;
  for (uint32_t s = 0; s < num_splits; ++s)
    if (parts[s * stride] > max) max = parts[s * stride];
  memset(out, 0, head_dim * sizeof(float));
  for (uint32_t s = 0; s < num_splits; ++s) {
    const float* part = parts + s * stride;
    const float weight = std::exp(part[0] - max);  // 0 where the row saw no position
    total += weight * part[1];
    for (uint32_t d = 0; d < head_dim; ++d) out[d] += weight * part[PART_HEADER + d];
  }
  const float scale = 1.0f / total;
  for (uint32_t d = 0; d < head_dim; ++d) out[d] *= scale;
}

}  // namespace

void body_merge(Context& context, const MergeArgs& args) {
  const auto& batch = *context.at<Batch>(args.batch);
  const float* parts = context.at<float>(args.part);
  const uint64_t row_floats = uint64_t{args.max_splits} * (PART_HEADER + args.head_dim);
  float* out = context.at<float>(args.out);
  for (uint32_t r = 0; r < batch.num_runs; ++r) {
    const BatchRun& run = batch.runs[r];
    const uint32_t splits = num_splits(batch, run, args.num_kv, args.num_workers, args.min_split, args.max_splits);
    const auto row_begin = static_cast<uint64_t>(run.row_begin);
    for (uint64_t row = row_begin; row < row_begin + static_cast<uint64_t>(run.num_rows); ++row)
      for (uint64_t h = 0; h < args.num_heads; ++h)
        merge_row(out + row * args.out_stride + h * args.head_dim, parts + (h * MAX_ROWS + row) * row_floats, splits,
                  args.head_dim);
  }
}

}  // namespace distmk
