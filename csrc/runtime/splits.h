// How an attention launch is cut: by the lengths of the moment, the same on every scheduler, worker and task.
#pragma once
#include "runtime/context.h"

namespace distmk {

// Splits of one run: enough pieces for every worker twice over, none under `min_split` positions.
DISTMK_FN uint32_t num_splits(const Batch& batch, const BatchRun& run, uint32_t num_kv, uint32_t num_workers,
                              uint32_t min_split, uint32_t max_splits) {
  const uint32_t pieces = batch.num_runs * num_kv;
  uint32_t wanted = (2 * num_workers + pieces - 1) / pieces;
  if (wanted > max_splits) wanted = max_splits;
  const auto length = static_cast<uint32_t>(run.kv_len);
  if (length <= (wanted - 1) * min_split) wanted = (length + min_split - 1) / min_split;  // rarely: divisions are slow
  return wanted ? wanted : 1;
}

// First position of split `s` of `n` over `kv_len` positions, dealt to within one.
DISTMK_FN uint32_t split_begin(uint32_t kv_len, uint32_t s, uint32_t n) {
  return kv_len * s / n;  // of lengths and splits whose product fits
}

struct AttentionInstance {
  uint32_t run, kv_head, split, num_splits;
};

DISTMK_FN uint32_t attention_splits(const AttentionArgs& args, const Batch& batch, uint32_t run) {
  return num_splits(batch, batch.runs[run], args.num_kv, args.num_workers, args.min_split, args.max_splits);
}

DISTMK_FN uint32_t num_attention_instances(const AttentionArgs& args, const Batch& batch) {
  uint32_t count = 0;
  DISTMK_ROLLED
  for (uint32_t run = 0; run < batch.num_runs; ++run) count += args.num_kv * attention_splits(args, batch, run);
  return count;
}

DISTMK_FN AttentionInstance attention_instance(const AttentionArgs& args, const Batch& batch, uint32_t index) {
  DISTMK_ROLLED
  for (uint32_t run = 0;; ++run) {
    const uint32_t splits = attention_splits(args, batch, run);
    if (index < args.num_kv * splits) return {run, index / splits, index % splits, splits};
    index -= args.num_kv * splits;
  }
}

// Instances a massive launch or a spread task has this time; task types without a length of the moment have all of
// theirs.
DISTMK_FN uint32_t num_instances(const Context& context, const TaskDesc& task) {
  if (task.type != static_cast<uint16_t>(TaskType::ATTENTION)) return task.max_instances;
  const auto& args = *reinterpret_cast<const AttentionArgs*>(task.args);
  return num_attention_instances(args, *context.batch(args.batch));
}

}  // namespace distmk
