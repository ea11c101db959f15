// The sampled rows of an iteration, and which of them need their logits over the whole vocabulary: rows that are drawn
// or scored (RowSample).
#pragma once
#include "runtime/rank_state.h"

namespace distmk {

DISTMK_FN bool needs_logits(const BatchRow& row) { return row.sample >= static_cast<int32_t>(RowSample::DRAW); }

// The sampled rows, as sampling tasks see them. A slab batch has them among its rows. A job batch has them behind its
// counts, and only the counts are cached.
class SampledRows {
 public:
  template <class Args>
  DISTMK_FN SampledRows(const RankState& state, const Args& args)
      : batch_(*state.batch(args.batch)),
        jobs_(args.is_job_batch ? reinterpret_cast<const JobBatch*>(state.address(args.batch)) : nullptr) {}

  DISTMK_FN uint32_t count() const { return batch_.num_rows; }
  DISTMK_FN BatchRow operator[](uint32_t row) const {
    return jobs_ ? load_vector(jobs_->rows + row) : batch_.rows[row];
  }
  // All lanes of a warp call this and share the rows.
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
