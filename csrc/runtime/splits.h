// Split-KV (flash-decoding): how the KV positions of an attention launch are cut into splits, and where splits leave
// their partials. The layer's window and the lengths in the batch metadata determine both, so schedulers, workers and
// tasks each compute them, with the same result.
#pragma once
#include "runtime/context.h"
#include "runtime/scoring.h"

namespace distmk {

// Whether every split has `min_kv_split_len` positions and begins at a multiple of that, whatever else the batch holds.
// The arithmetic of a row is then the same in any batch and with any chunking of its prompt. Positions before a window
// are in splits, too. `Args`: of attention or of a combine.
template <class Args>
DISTMK_FN bool has_fixed_splits(const Args& args) {
  return !args.kv_split_budget;
}

// Whether the combine is fused into the GEMVs that consume attention's output. It is if the batch is one row that sees
// few enough positions for COMBINE_WIDTH splits. `Args`: of attention, of a combine or of a linear task.
template <class Args>
DISTMK_FN bool fuses_combine(const Args& args, uint32_t num_rows, const BatchRun& run) {
  return num_rows == 1 && num_seen(args.window, run, 1) <= args.fused_combine_len;
}
DISTMK_FN uint32_t max_fused_splits(uint32_t max_kv_splits) {
  return max_kv_splits < COMBINE_WIDTH ? max_kv_splits : COMBINE_WIDTH;
}

// Number of splits of each run. The runs share a budget of one split per worker. An only run gets all of it. Of several
// runs, each gets as many splits as it needs for none to be longer than `split_len_`. Shares in proportion to the
// lengths would not do, because they are rounded down: a run hardly shorter than the others would lose a whole split,
// one of two if the budget is two splits a run. No run has more than ceil(length / min_kv_split_len) splits. All lanes
// of a warp construct this together.
class Splits {
 public:
  template <class Args>  // of attention or of a combine
  DISTMK_FN Splits(const Args& args, const Batch& batch)
      : budget_(args.kv_split_budget),
        min_kv_split_len_(args.min_kv_split_len),
        window_(args.window),
        max_kv_splits_(fuses_combine(args, batch.num_rows, batch.runs[0]) ? max_fused_splits(args.max_kv_splits)
                                                                          : args.max_kv_splits) {
    static_assert(MAX_ROWS <= 32, "");
    if (budget_ && batch.num_runs > 1) split_len_ = shared_split_len(batch);
  }

  DISTMK_FN uint32_t of(const BatchRun& run) const {
    if (!budget_) return quotient_up(static_cast<uint32_t>(run.kv_len), min_kv_split_len_);
    const uint32_t length = num_seen(window_, run);
    if (!split_len_) return of_only_run(budget_, min_kv_split_len_, max_kv_splits_, length);
    const uint32_t wanted = quotient_up(length, split_len_);
    return wanted < max_kv_splits_ ? wanted : max_kv_splits_;
  }

  // Splits of a batch-1 row whose combine is fused.
  template <class Args>
  DISTMK_FN static uint32_t of_fused(const Args& args, const BatchRun& run) {
    return of_only_run(args.kv_split_budget, args.min_kv_split_len, max_fused_splits(args.max_kv_splits),
                       num_seen(args.window, run, 1));
  }

 private:
  uint32_t budget_, min_kv_split_len_, window_, max_kv_splits_;
  uint32_t split_len_ = 0;  // positions; 0 for an only run

  DISTMK_FN static uint32_t quotient_up(uint32_t dividend, uint32_t divisor) {
    return (dividend + divisor - 1) / divisor;
  }

  // The shortest length with which no worker has a second split, in steps of a sixteenth and up to twice the mean. If
  // there is none, many workers have two splits whatever their length is. Splits of the mean length then balance best.
  DISTMK_FN uint32_t shared_split_len(const Batch& batch) const {
    const auto sum_over_runs = [&](const auto& of_length) {
      return sum_of_sizes(batch.num_runs, [&](uint32_t run) { return of_length(num_seen(window_, batch.runs[run])); });
    };
    const uint32_t mean = sum_over_runs([](uint32_t length) { return length; }) / budget_,
                   least = mean > min_kv_split_len_ ? mean : min_kv_split_len_;
    for (uint32_t len = least + least / 16; len <= 2 * least; len += len / 16 + 1)
      if (sum_over_runs([&](uint32_t length) { return quotient_up(length, len); }) <= budget_) return len;
    return least;
  }

  // Numbers above COMBINE_WIDTH are rounded down to a multiple of it.
  DISTMK_FN static uint32_t of_only_run(uint32_t wanted, uint32_t min_kv_split_len, uint32_t max_kv_splits,
                                        uint32_t length) {
    if (!wanted) wanted = 1;
    if (wanted > max_kv_splits) wanted = max_kv_splits;
    if (length <= (wanted - 1) * min_kv_split_len) wanted = quotient_up(length, min_kv_split_len);
    return wanted < COMBINE_WIDTH ? wanted : wanted / COMBINE_WIDTH * COMBINE_WIDTH;
  }
};

// Positions that a warp on a GPU takes at once. A split boundary inside such a tile wastes part of it.
constexpr uint32_t KV_TILE = 16;

// First position of split `s` of `n` over the positions that a run sees; with s = n, the run's kv_len. Short splits are
// equal to within one position; of longer splits all but the first begin at a multiple of KV_TILE. Fixed splits always
// end where a whole split would, which may be past kv_len.
template <class Args>
DISTMK_FN uint32_t split_begin(const Args& args, const BatchRun& run, uint32_t s, uint32_t n) {
  if (has_fixed_splits(args)) return s * args.min_kv_split_len;
  const uint32_t length = num_seen(args.window, run), first = static_cast<uint32_t>(run.kv_len) - length;
  const uint32_t begin = first + length * s / n;  // the product of length and splits fits 32 bits
  return s && s < n && length >= KV_TILE * n ? begin / KV_TILE * KV_TILE : begin;
}

struct AttentionInstance {
  uint32_t run, kv_head, split, num_splits;
};

DISTMK_FN uint32_t num_attention_instances(const AttentionArgs& args, const Batch& batch) {
  const Splits splits(args, batch);
  return args.num_kv * sum_of_sizes(batch.num_runs, [&](uint32_t run) { return splits.of(batch.runs[run]); });
}

// Instances are ordered by run, then KV head, then split.
DISTMK_FN AttentionInstance attention_instance(const AttentionArgs& args, const Batch& batch, uint32_t index) {
  const Splits splits(args, batch);
  const uint32_t run =
      find_item(batch.num_runs, [&](uint32_t r) { return args.num_kv * splits.of(batch.runs[r]); }, &index);
  const uint32_t count = splits.of(batch.runs[run]);
  return {run, index / count, index % count, count};
}

// Slice `index` of a combine task. Slices have COMBINE_SLICE elements and are numbered from the first slice of the
// task's first head.
struct CombineSlice {
  uint32_t head, begin, end;  // elements of the head

  DISTMK_FN CombineSlice(const CombineArgs& args, uint32_t index) {
    const uint32_t slices = (args.head_dim + COMBINE_SLICE - 1) / COMBINE_SLICE;
    head = (args.first_slice + index) / slices;
    begin = (args.first_slice + index) % slices * COMBINE_SLICE;
    end = begin + COMBINE_SLICE < args.head_dim ? begin + COMBINE_SLICE : args.head_dim;
  }
};

// Partials are f32 [slice, row, split, PARTIAL_FLOATS]. Returns the offset, in floats, of a row's split within its
// slice.
DISTMK_FN uint64_t partial_begin(uint32_t row, uint32_t split, uint32_t max_kv_splits) {
  return uint64_t{row * max_kv_splits + split} * PARTIAL_FLOATS;
}
// The offset, in floats, from the first slice on.
DISTMK_FN uint64_t partial_of_slice(uint32_t slice, uint32_t row, uint32_t split, uint32_t max_kv_splits) {
  return partial_begin(slice * MAX_ROWS + row, split, max_kv_splits);
}
DISTMK_FN uint64_t slice_floats(uint32_t max_kv_splits) { return uint64_t{MAX_ROWS} * max_kv_splits * PARTIAL_FLOATS; }

// Fused partials are bf16 [head, split, FUSED_PARTIAL_HEADER + head_dim]. Returns the offset, in elements, of a head's
// split.
DISTMK_FN uint32_t fused_partial_begin(uint32_t head, uint32_t split, uint32_t max_kv_splits, uint32_t head_dim) {
  return (head * max_fused_splits(max_kv_splits) + split) * (FUSED_PARTIAL_HEADER + head_dim);
}

// The run that a row belongs to. The search starts at run `row`, because most runs have one row.
DISTMK_FN const BatchRun& run_of(const Batch& batch, uint32_t row) {
  uint32_t run = row < batch.num_runs ? row : batch.num_runs - 1;
  while (static_cast<uint32_t>(batch.runs[run].row_begin) > row) --run;
  return batch.runs[run];
}

}  // namespace distmk
