// Split-KV: how an attention launch's KV positions are cut into splits, and where splits leave their partials. It
// follows from the layer's window and the lengths in the batch metadata alone, so schedulers, workers and tasks work it
// out for themselves, with the same result.
#pragma once
#include "runtime/context.h"
#include "runtime/scoring.h"

namespace distmk {

// Whether every split has `min_split` positions and begins at a multiple of that, whatever else the batch holds. The
// arithmetic of a row is then the same in any company and in any chunk of its prompt. Positions before a window are in
// splits, too. `args`: of attention or of a combine.
template <class Args>
DISTMK_FN bool has_fixed_splits(const Args& args) {
  return !args.split_budget;
}

// Whether the combine is fused into the GEMVs that consume attention's output: of a batch of one row that sees few
// enough positions for at most COMBINE_WIDTH splits. `args`: of attention, of a combine or of a linear task.
template <class Args>
DISTMK_FN bool fuses_combine(const Args& args, uint32_t num_rows, const BatchRun& run) {
  return num_rows == 1 && num_seen(args.window, run, 1) <= args.fused_combine_len;
}
DISTMK_FN uint32_t max_fused_splits(uint32_t max_splits) {
  return max_splits < COMBINE_WIDTH ? max_splits : COMBINE_WIDTH;
}

// Number of splits of each run: its share, by the positions that it sees, of a budget for all runs, so that all splits
// are about as long and no worker has two; at least `min_split` positions each. Called by all lanes of a warp together.
class Splits {
 public:
  template <class Args>  // of attention or of a combine
  DISTMK_FN Splits(const Args& args, const Batch& batch)
      : budget_(args.split_budget),
        min_split_(args.min_split),
        window_(args.window),
        max_splits_(fuses_combine(args, batch.num_rows, batch.runs[0]) ? max_fused_splits(args.max_splits)
                                                                       : args.max_splits) {
    static_assert(MAX_ROWS <= 32, "");
    total_ = sum_of_sizes(batch.num_runs, [&](uint32_t run) { return num_seen(window_, batch.runs[run]); });
  }

  DISTMK_FN uint32_t of(const BatchRun& run) const {
    if (!budget_) return (static_cast<uint32_t>(run.kv_len) + min_split_ - 1) / min_split_;
    const uint32_t length = num_seen(window_, run);
    return bounded(length == total_ ? budget_ : length * budget_ / total_, min_split_, max_splits_,
                   length);  // divisions are slow
  }

  // Of a batch-1 row whose combine is fused.
  template <class Args>
  DISTMK_FN static uint32_t of_fused(const Args& args, const BatchRun& run) {
    return bounded(args.split_budget, args.min_split, max_fused_splits(args.max_splits), num_seen(args.window, run, 1));
  }

 private:
  uint32_t budget_, min_split_, window_, max_splits_, total_ = 0;

  // More than COMBINE_WIDTH are rounded down to a multiple of it.
  DISTMK_FN static uint32_t bounded(uint32_t wanted, uint32_t min_split, uint32_t max_splits, uint32_t length) {
    if (!wanted) wanted = 1;
    if (wanted > max_splits) wanted = max_splits;
    if (length <= (wanted - 1) * min_split) wanted = (length + min_split - 1) / min_split;
    return wanted < COMBINE_WIDTH ? wanted : wanted / COMBINE_WIDTH * COMBINE_WIDTH;
  }
};

constexpr uint32_t KV_TILE =
    16;  // positions that a GPU's warp takes at once; a split boundary inside one wastes part of it

// First position of split `s` of `n` over the positions that a run sees; its kv_len where s = n. Splits are equal to
// within one position where they are short, else all but the first begin at a multiple of KV_TILE. Fixed ones have the
// end of a whole split, behind kv_len.
template <class Args>
DISTMK_FN uint32_t split_begin(const Args& args, const BatchRun& run, uint32_t s, uint32_t n) {
  if (has_fixed_splits(args)) return s * args.min_split;
  const uint32_t length = num_seen(args.window, run), first = static_cast<uint32_t>(run.kv_len) - length;
  const uint32_t begin = first + length * s / n;  // of lengths and splits whose product fits 32 bits
  return s && s < n && length >= KV_TILE * n ? begin / KV_TILE * KV_TILE : begin;
}

struct AttentionInstance {
  uint32_t run, kv_head, split, num_splits;
};

DISTMK_FN uint32_t num_attention_instances(const AttentionArgs& args, const Batch& batch) {
  const Splits splits(args, batch);
  return args.num_kv * sum_of_sizes(batch.num_runs, [&](uint32_t run) { return splits.of(batch.runs[run]); });
}

// Instances are ordered by run, KV head, split.
DISTMK_FN AttentionInstance attention_instance(const AttentionArgs& args, const Batch& batch, uint32_t index) {
  const Splits splits(args, batch);
  const uint32_t run =
      find_item(batch.num_runs, [&](uint32_t r) { return args.num_kv * splits.of(batch.runs[r]); }, &index);
  const uint32_t count = splits.of(batch.runs[run]);
  return {run, index / count, index % count, count};
}

// Slice `index` of a combine task; slices of COMBINE_SLICE elements are counted from the first one of its first head.
struct CombineSlice {
  uint32_t head, begin, end;  // elements of the head

  DISTMK_FN CombineSlice(const CombineArgs& args, uint32_t index) {
    const uint32_t slices = (args.head_dim + COMBINE_SLICE - 1) / COMBINE_SLICE;
    head = (args.first_slice + index) / slices;
    begin = (args.first_slice + index) % slices * COMBINE_SLICE;
    end = begin + COMBINE_SLICE < args.head_dim ? begin + COMBINE_SLICE : args.head_dim;
  }
};

// Partials are f32 [slice, row, split, PARTIAL_FLOATS]. Offset in floats of a row's split in its slice.
DISTMK_FN uint64_t partial_begin(uint32_t row, uint32_t split, uint32_t max_splits) {
  return uint64_t{row * max_splits + split} * PARTIAL_FLOATS;
}
// The same from the first slice on.
DISTMK_FN uint64_t partial_of_slice(uint32_t slice, uint32_t row, uint32_t split, uint32_t max_splits) {
  return partial_begin(slice * MAX_ROWS + row, split, max_splits);
}
DISTMK_FN uint64_t slice_floats(uint32_t max_splits) { return uint64_t{MAX_ROWS} * max_splits * PARTIAL_FLOATS; }

// Fused partials are bf16 [head, split, FUSED_PARTIAL_HEADER + head_dim]. Offset in elements of a head's split.
DISTMK_FN uint32_t fused_partial_begin(uint32_t head, uint32_t split, uint32_t max_splits, uint32_t head_dim) {
  return (head * max_fused_splits(max_splits) + split) * (FUSED_PARTIAL_HEADER + head_dim);
}

// The run that a row belongs to. The search starts at run `row`: mostly runs are one row each.
DISTMK_FN const BatchRun& run_of(const Batch& batch, uint32_t row) {
  uint32_t run = row < batch.num_runs ? row : batch.num_runs - 1;
  while (static_cast<uint32_t>(batch.runs[run].row_begin) > row) --run;
  return batch.runs[run];
}

}  // namespace distmk
