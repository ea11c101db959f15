// The rows of a job iteration: which run a row belongs to, and which rank owns it.
#pragma once
#include "runtime/context.h"

namespace distmk {

// The batch of a job task; its counts are in the cached part (Context::batch).
DISTMK_FN const JobBatch& job_batch(const Context& context, uint64_t operand) {
  return *context.at<const JobBatch>(operand);
}

// The rows of the residual stream are dealt to ranks in consecutive shares of this many.
DISTMK_FN uint32_t rows_per_rank(uint32_t num_rows, uint32_t num_ranks) {
  return (num_rows + num_ranks - 1) / num_ranks;
}

// An operand in the memory of a rank that a pointer reaches: it may be in this rank's own arena only if that is the
// rank.
template <class T>
DISTMK_FN T* on_rank(const Context& context, uint32_t rank, uint64_t operand) {
  return rank == context.rank() ? context.at<T>(operand) : context.peer<T>(rank, operand);
}

// A row of a job iteration in its sequence.
struct JobRow {
  uint32_t slot, position;
};
DISTMK_FN JobRow job_row(const BatchRun* runs, uint32_t num_runs, uint32_t row) {
  uint32_t run = row < num_runs ? row : num_runs - 1;  // runs of one row come first
  while (static_cast<uint32_t>(runs[run].row_begin) > row) --run;
  const BatchRun& found = runs[run];
  return {static_cast<uint32_t>(found.slot),
          static_cast<uint32_t>(found.kv_len - found.num_rows) + row - static_cast<uint32_t>(found.row_begin)};
}
DISTMK_FN JobRow job_row(const JobBatch& batch, uint32_t num_runs, uint32_t row) {
  return job_row(batch.runs, num_runs, row);
}

// Offset in elements of column `col` of row `row` of activations of `num_cols` columns (distmk/tasks/activations.py).
DISTMK_FN uint64_t activation_offset(uint32_t row, uint32_t col, uint32_t num_cols, bool tiled) {
  if (!tiled) return uint64_t{row} * num_cols + col;
  const uint32_t chunk = (col % ACTIVATION_BLOCK_COLS / 8) ^ (row % 8);
  return (uint64_t{col / ACTIVATION_BLOCK_COLS} * MAX_BUCKET_ROWS + row) * ACTIVATION_BLOCK_COLS + chunk * 8 + col % 8;
}

}  // namespace distmk
