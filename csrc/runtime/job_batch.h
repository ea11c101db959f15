// The rows of a job iteration: which run a row belongs to, and which rank owns it.
#pragma once
#include "runtime/context.h"

namespace distmk {

// The batch of a job task. Its counts are also in the cached batch (Context::batch).
DISTMK_FN const JobBatch& job_batch(const Context& context, uint64_t operand) {
  return *context.at<const JobBatch>(operand);
}

// Each rank owns this many consecutive rows of the residual stream.
DISTMK_FN uint32_t rows_per_rank(uint32_t num_rows, uint32_t num_ranks) {
  return (num_rows + num_ranks - 1) / num_ranks;
}

// An operand in the memory of a rank that pointers reach. An operand in the arena is valid only for this rank itself.
template <class T>
DISTMK_FN T* on_rank(const Context& context, uint32_t rank, uint64_t operand) {
  return rank == context.rank() ? context.at<T>(operand) : context.peer<T>(rank, operand);
}

// A row of a job iteration: the slot of its sequence, and its position there.
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

// The place of a column in the order of lanes: pair j of chunk t of every 32 columns is pair t of chunk j.
DISTMK_FN uint32_t lane_order(uint32_t col) { return (col & ~0x1eu) | col % 8 / 2 * 8 | col % 32 / 8 * 2; }

// Offset, in elements, of a column of a row in activations of `num_cols` columns (distmk/tasks/activations.py).
// `layout`: an ActivationLayout. An even column and the next one are adjacent.
DISTMK_FN uint64_t activation_offset(uint32_t row, uint32_t col, uint32_t num_cols, uint32_t layout) {
  if (!layout) return uint64_t{row} * num_cols + col;
  if (HAS_PACKED_WEIGHTS && layout == static_cast<uint32_t>(ActivationLayout::LANE_TILES)) col = lane_order(col);
  const uint32_t chunk = (col % ACTIVATION_BLOCK_COLS / 8) ^ (row % 8);
  return (uint64_t{col / ACTIVATION_BLOCK_COLS} * MAX_BUCKET_ROWS + row) * ACTIVATION_BLOCK_COLS + chunk * 8 + col % 8;
}

}  // namespace distmk
