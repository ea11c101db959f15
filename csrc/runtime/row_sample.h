// Which rows of a batch need their logits over the whole vocabulary: those that are drawn or scored (RowSample).
#pragma once
#include "abi.h"
#include "platform/platform.h"

namespace distmk {

DISTMK_FN bool needs_logits(const BatchRow& row) { return row.sample >= static_cast<int32_t>(RowSample::DRAW); }
DISTMK_FN bool any_needs_logits(const Batch& batch) {
  bool any = false;
  DISTMK_NO_UNROLL
  for (uint32_t row = 0; row < batch.num_rows; ++row) any |= needs_logits(batch.rows[row]);
  return any;
}

}  // namespace distmk
