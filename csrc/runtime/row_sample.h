// The sampled rows of an iteration, and which of them need their logits over the whole vocabulary: those that are drawn
// or scored (RowSample).
#pragma once
#include "runtime/rank_state.h"

namespace distmk {

DISTMK_FN bool needs_logits(const BatchRow& row) { return row.sample >= static_cast<int32_t>(RowSample::DRAW); }

// As sampling tasks see them. A slab batch has them among its rows, one of jobs has them behind its counts, which
// alone are cached.
class SampledRows {
 public:
  template <class Args>
  DISTMK_FN SampledRows(const RankState& state, const Args& args)
      : batch_(*state.batch(args.batch)),
        jobs_(args.job_batch ? reinterpret_cast<const JobBatch*>(state.address(args.batch)) : nullptr) {}

  DISTMK_FN uint32_t count() const { return batch_.num_rows; }
  DISTMK_FN BatchRow operator[](uint32_t row) const {
    return jobs_ ? load_vector(jobs_->rows + row) : batch_.rows[row];
  }
  // Called by all lanes of a warp, which divide the rows.
  DISTMK_FN bool any_needs_logits(const Team& warp) const {
    bool any = false;
    DISTMK_NO_UNROLL
    for (uint32_t row = warp.index; row < count(); row += warp.size) any |= needs_logits((*this)[row]);
    return !warp.all(!any);
  }

 private:
  const Batch& batch_;
  const JobBatch* jobs_;
};

}  // namespace distmk
