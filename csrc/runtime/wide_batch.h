// The rows of a wide iteration: which run a row belongs to, and which rank owns it.
#pragma once
#include "runtime/context.h"

namespace distmk {

// The batch of a wide task; its counts are in the cached part (Context::batch).
DISTMK_FN const WideBatch& wide_batch(const Context& context, uint64_t operand) {
  return *context.at<const WideBatch>(operand);
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

// A row of a wide iteration in its sequence.
struct WideRow {
  uint32_t slot, position;
};
DISTMK_FN WideRow wide_row(const BatchRun* runs, uint32_t num_runs, uint32_t row) {
  uint32_t run = row < num_runs ? row : num_runs - 1;  // runs of one row come first
  while (static_cast<uint32_t>(runs[run].row_begin) > row) --run;
  const BatchRun& found = runs[run];
  return {static_cast<uint32_t>(found.slot),
          static_cast<uint32_t>(found.kv_len - found.num_rows) + row - static_cast<uint32_t>(found.row_begin)};
}
DISTMK_FN WideRow wide_row(const WideBatch& batch, uint32_t num_runs, uint32_t row) {
  return wide_row(batch.runs, num_runs, row);
}

// Offset in elements of column `col` of row `row` of activations of `num_cols` columns (distmk/tasks/wide.py).
DISTMK_FN uint64_t activation_offset(uint32_t row, uint32_t col, uint32_t num_cols, bool tiled) {
  if (!tiled) return uint64_t{row} * num_cols + col;
  const uint32_t chunk = (col % WIDE_COLS / 8) ^ (row % 8);
  return (uint64_t{col / WIDE_COLS} * WIDE_ROWS + row) * WIDE_COLS + chunk * 8 + col % 8;
}

}  // namespace distmk
