// Reset of Lamport rows after the batch has shrunk. All rows of a buffer must be zero when it is used again, for
// however many rows, so an iteration also resets the rows that only the one before had. That is rare, so it is left to
// the cold path (consumers.cuh).
#pragma once
#include "device/comm/lamport.cuh"
#include "runtime/task_types.h"

namespace distmk {

DISTMK_FN bool batch_shrank(const Batch* batch) { return batch && batch->num_reset_rows > batch->num_rows; }

// Resets the rows that only the last iteration had; the body has reset the others.
template <class T>
DISTMK_FN void reset_rows(const Context& context, const Batch& batch, T* columns, uint32_t num_cols, uint32_t stride) {
  DISTMK_NO_UNROLL
  for (uint32_t row = batch.num_rows; row < batch.num_reset_rows; ++row) {
    DISTMK_NO_UNROLL
    for (uint32_t i = context.team.index; i < num_cols; i += context.team.size)
      publish_store(columns + uint64_t{row} * stride + i, 0);
  }
}
// The same of all columns that a task resets.
template <class T, class Args>
DISTMK_FN void reset_columns(const Context& context, const Args& args, const Batch& batch, uint32_t num_cols,
                             uint32_t stride) {
  reset_rows(context, batch, context.at<T>(args.reset), num_cols, stride);
}

// A type with RESETS_ROWS defines beside its body, under device/: it resets, in the columns of `args.reset` that the
// task writes, the rows from batch.num_rows to batch.num_reset_rows.
#define DISTMK_DECLARE_HOOK(id, name, Args) \
  DISTMK_FN void reset_stale_rows(const Context& context, const Args& args, const Batch& batch);
DISTMK_TASK_TYPES_RESETS_ROWS(DISTMK_DECLARE_HOOK)
#undef DISTMK_DECLARE_HOOK

// By all threads that have run the body of a task of that type.
template <uint32_t TYPE>
DISTMK_FN void reset_stale_rows(const Context& context) {
  if constexpr (TraitsOf<TYPE>::RESETS_ROWS) {
    const auto& args = args_of<typename TraitsOf<TYPE>::Args>(*context.task.desc);
    const Batch* batch = context.batch(args.batch);
    if (args.reset && batch_shrank(batch)) reset_stale_rows(context, args, *batch);
  }
}

}  // namespace distmk
