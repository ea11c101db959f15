// The combine task of split-KV attention on the host.
#include <algorithm>

#include "host/simd.h"
#include "runtime/log_sum_exp.h"
#include "runtime/splits.h"

namespace distmk {

namespace {

// out[d] = sum_s w_s o_s[d] / sum_s w_s l_s over a row's splits s (runtime/log_sum_exp.h). The order of the splits is
// fixed, so the result does not depend on which split was computed first. If the row sees no position of a split, m_s =
// -inf and w_s = 0.
void combine_slice(uint16_t* __restrict out, const float* __restrict partials, uint32_t num_splits,
                   uint32_t num_elements) {
  float acc[COMBINE_SLICE] = {};
  const auto partial = [&](uint32_t s) {
    return LogSumExp<BaseE>{partials[s * PARTIAL_FLOATS], partials[s * PARTIAL_FLOATS + 1]};
  };
  auto total = begin_merge<BaseE>(num_splits, partial);
  for (uint32_t s = 0; s < num_splits; ++s) {
    const float weight = total.add(partial(s));
    const float* elements = partials + s * PARTIAL_FLOATS + PARTIAL_HEADER_FLOATS;
    for (uint32_t d = 0; d < num_elements; ++d) acc[d] += weight * elements[d];
  }
  const float scale = normalizer(total.sum);
  for (uint32_t d = 0; d < num_elements; ++d) out[d] = simd::to_bf16(acc[d] * scale);
}

}  // namespace

void body_combine(Context& context, const CombineArgs& args) {
  const auto& batch = *context.at<Batch>(args.batch);
  if (fuses_combine(args, batch.num_rows, batch.runs[0])) return;
  float* partials = context.at<float>(args.partials);
  auto *out = context.at<uint16_t>(args.out), *reset = context.at<uint16_t>(args.lamport_reset);
  const Splits splits(args, batch);
  for (uint32_t row = 0; row < batch.num_rows; ++row)
    for (uint32_t i = 0; i < args.num_slices; ++i) {
      const CombineSlice slice(args, i);
      const uint64_t begin = uint64_t{row} * args.out_stride + uint64_t{slice.head} * args.head_dim + slice.begin;
      const uint32_t num_splits = splits.of(run_of(batch, row)), num_elements = slice.end - slice.begin;
      float* of_row = partials + i * slice_floats(args.max_kv_splits) + partial_begin(row, 0, args.max_kv_splits);
      combine_slice(out + begin, of_row, num_splits, num_elements);
      simd::clear(reset ? reset + begin : nullptr, 1, 0, num_elements);
      if (args.polls_partials) simd::clear(of_row, num_splits, PARTIAL_FLOATS, PARTIAL_FLOATS);
    }
}

}  // namespace distmk
