// The tasks that go through a job iteration row by row: embed_rows and reduce_rows. reduce_rows sums GEMM outputs into
// the residual stream (a reduce-scatter), normalizes the rows, and writes them to every rank (an all-gather).
#pragma once
#include "device/attention/lse.cuh"
#include "device/core/bf16.cuh"
#include "device/core/marks.cuh"
#include "device/core/shared.cuh"
#include "device/jobs/row_vectors.cuh"
#include "runtime/rms.h"

namespace distmk {
namespace jobs {

constexpr uint32_t ITEMS_IN_FLIGHT = 4;  // loads in flight per thread
constexpr uint32_t SUMMED_ROWS = 32;     // rows at once, if they fit in shared memory

// A part of a row of the embedding table: loads bf16, stores float32. EmbeddedElement is the version for rows that are
// not aligned.
struct EmbeddedChunk {
  static constexpr uint32_t COLS = 8;
  uint4 raw;

  DISTMK_FN void load(const __nv_bfloat16* from) { raw = *reinterpret_cast<const uint4*>(from); }
  DISTMK_FN void clear() { raw = zero_chunk(); }
  DISTMK_FN static float2 pair(uint32_t v) { return {low_of_pair(v), high_of_pair(v)}; }
  DISTMK_FN void store(float* to) const {
    const float2 a = pair(raw.x), b = pair(raw.y), c = pair(raw.z), d = pair(raw.w);
    reinterpret_cast<float4*>(to)[0] = {a.x, a.y, b.x, b.y};
    reinterpret_cast<float4*>(to)[1] = {c.x, c.y, d.x, d.y};
  }
};
struct EmbeddedElement {
  static constexpr uint32_t COLS = 1;
  float value;

  DISTMK_FN void load(const __nv_bfloat16* from) { value = __bfloat162float(*from); }
  DISTMK_FN void clear() { value = 0.0f; }
  DISTMK_FN void store(float* to) const { *to = value; }
};

// Embeds all rows of a worker together, so that many loads are in flight.
template <class Chunk>
DISTMK_FN void embed_rows(const Context& context, const EmbedRowsArgs& args, const WorkerRows& rows,
                          uint32_t num_rows) {
  const int32_t* tokens = job_batch(context, args.batch).tokens;
  const auto* table = context.at<__nv_bfloat16>(args.table);
  const uint32_t per_row = args.k / Chunk::COLS, num_items = rows.count * per_row;
  const uint32_t share = rows_per_rank(num_rows, context.num_ranks());
  for (uint32_t first = context.team.index; first < num_items; first += ITEMS_IN_FLIGHT * NUM_CONSUMERS) {
    Chunk chunks[ITEMS_IN_FLIGHT];
    const auto item = [&](uint32_t i) { return min(first + i * NUM_CONSUMERS, num_items - 1); };
#pragma unroll
    for (uint32_t i = 0; i < ITEMS_IN_FLIGHT; ++i) {
      const uint32_t in_rows = item(i) / per_row, col = (item(i) - in_rows * per_row) * Chunk::COLS;
      const auto token = static_cast<uint32_t>(__ldcg(tokens + rows.at(in_rows)));
      if (token >= args.first_token && token < args.last_token)
        chunks[i].load(table + uint64_t{token - args.first_token} * args.k + col);
      else
        chunks[i].clear();
    }
#pragma unroll
    for (uint32_t i = 0; i < ITEMS_IN_FLIGHT; ++i) {
      if (first + i * NUM_CONSUMERS >= num_items) break;
      const uint32_t in_rows = item(i) / per_row, col = (item(i) - in_rows * per_row) * Chunk::COLS;
      const uint32_t row = rows.at(in_rows), owner = row / share;
      chunks[i].store(on_rank<float>(context, owner, args.out) + uint64_t{row - owner * share} * args.out_stride + col);
    }
  }
}

// x (+)= sum of the parts, one Vector (float4 or float) at a time. Sums stay in shared memory until the row's sum of
// squares is known. POST_NORM: x (+)= sum / rms(sum) * weight, which takes a second pass of the same kind.
template <class Vector, bool POST_NORM>
class RowReduction {
 public:
  static constexpr uint32_t COLS = sizeof(Vector) / sizeof(float), STEP = NUM_CONSUMERS * COLS;

  DISTMK_FN RowReduction(const Context& context, const ReduceRowsArgs& args, const WorkerRows& rows, uint32_t first_row)
      : context_(context), args_(args), rows_(rows), first_row_(first_row) {}

  // Sums up the worker's rows `first` to `end`. Other warps' sums of squares are visible after the next team.sync().
  DISTMK_FN void add_up(uint32_t first, uint32_t end) const {
    for (uint32_t i = first; i < end; ++i) {
      float squares = 0.0f;
      for (uint32_t col = context_.team.index * COLS; col < args_.k; col += ITEMS_IN_FLIGHT * STEP)
        squares += add_up_cols(rows_.at(i), i - first, col);
      keep_squares(squares, i - first);
    }
  }
  // POST_NORM: adds the normalized sums to x, and the new x takes their place in shared memory. After the next
  // team.sync(), all warps have read the sums' squares.
  DISTMK_FN void add_normalized(uint32_t first, uint32_t end) const {
    const auto* weight = context_.at<float>(args_.post_norm);
    for (uint32_t i = first; i < end; ++i) {
      const float scale = over_rms(i - first);
      float* x = context_.at<float>(args_.x) + uint64_t{rows_.at(i)} * args_.k;
      float squares = 0.0f;
      for (uint32_t col = context_.team.index * COLS; col < args_.k; col += ITEMS_IN_FLIGHT * STEP)
        squares += add_normalized_cols(x, weight, sums_at(i - first), scale, col);
      keep_squares(squares, i - first + SUMMED_ROWS);
    }
  }
  DISTMK_FN void store(uint32_t first, uint32_t end) const {
    for (uint32_t i = first; i < end; ++i) {
      const float scale = args_.skips_rms ? 1.0f : over_rms(i - first + (POST_NORM ? SUMMED_ROWS : 0));
      const uint32_t row = first_row_ + rows_.at(i);
      for (uint32_t col = context_.team.index * COLS; col < args_.k; col += STEP) {
        const Vector sums = *reinterpret_cast<const Vector*>(sums_at(i - first) + col);
        if (HAS_PACKED_WEIGHTS && args_.lane_out) store_in_lane_order(row, col, sums, scale);
        if (HAS_PACKED_WEIGHTS && !args_.out) continue;
        const uint64_t at = activation_offset(row, col, args_.k, args_.tiled);
        for (uint32_t rank = 0; rank < args_.num_ranks; ++rank)
          store_scaled(on_rank<__nv_bfloat16>(context_, rank, args_.out) + at, sums, scale);
      }
    }
  }

 private:
  const Context& context_;
  const ReduceRowsArgs& args_;
  const WorkerRows& rows_;
  uint32_t first_row_;

  DISTMK_FN float* sums_at(uint32_t i) const { return shared().at<Overlay::SUMS, float>() + i * args_.k; }
  // Each warp's sum of squares of row i. Rows from SUMMED_ROWS on are the results of POST_NORM.
  DISTMK_FN static float* squares_at(uint32_t i) { return shared().at<Overlay::SQUARES, float>() + i * NUM_WARPS; }
  DISTMK_FN static void keep_squares(float squares, uint32_t i) {
    squares = attention::warp_sum(squares);
    if (threadIdx.x % 32 == 0) squares_at(i)[threadIdx.x / 32] = squares;
  }
  DISTMK_FN float over_rms(uint32_t i) const {
    float squares = 0.0f;
    for (uint32_t warp = 0; warp < NUM_WARPS; ++warp) squares += squares_at(i)[warp];
    return distmk::over_rms(squares, args_.k, args_.eps);
  }

  // Stores columns for packed weights: times the weight of the norm, in the order of lanes.
  DISTMK_FN void store_in_lane_order(uint32_t row, uint32_t col, Vector sums, float scale) const {
    const auto* norm = context_.at<float>(args_.input_norm);
    if (args_.input_norm) sums = product(sums, *reinterpret_cast<const Vector*>(norm + col));
    const auto offset = [&](uint32_t c) {
      return activation_offset(row, c, args_.k, static_cast<uint32_t>(ActivationLayout::LANE_TILES));
    };
    for (uint32_t rank = 0; rank < args_.num_ranks; ++rank)
      store_pairs(on_rank<__nv_bfloat16>(context_, rank, args_.lane_out), offset(col), offset(col + COLS / 2), sums,
                  scale);
  }

  // Sums up ITEMS_IN_FLIGHT columns: col, col + STEP, and so on. Returns the sum of their squares.
  DISTMK_FN float add_up_cols(uint32_t row, uint32_t in_group, uint32_t col) const {
    float* x = context_.at<float>(args_.x) + uint64_t{row} * args_.k;
    const float* parts = context_.at<float>(args_.parts) + uint64_t{row} * args_.parts_stride;
    uint32_t cols[ITEMS_IN_FLIGHT];  // beyond the last column: `col` again
    Vector sums[ITEMS_IN_FLIGHT];
#pragma unroll
    for (uint32_t j = 0; j < ITEMS_IN_FLIGHT; ++j) {
      cols[j] = col + j * STEP < args_.k ? col + j * STEP : col;
      load_if(!POST_NORM && args_.accumulates, x + cols[j], sums[j]);
    }
    for (uint32_t rank = 0; rank < args_.num_ranks; ++rank) {
      const float* rank_parts = parts + uint64_t{rank * args_.parts_per_rank} * args_.k;
      add_rank_parts(rank_parts, cols, sums);
    }
    float squares = 0.0f;
#pragma unroll
    for (uint32_t j = 0; j < ITEMS_IN_FLIGHT; ++j) {
      if (col + j * STEP >= args_.k) break;
      if (!POST_NORM) *reinterpret_cast<Vector*>(x + cols[j]) = sums[j];
      *reinterpret_cast<Vector*>(sums_at(in_group) + cols[j]) = sums[j];
      squares += square(sums[j]);
    }
    return squares;
  }
  // Adds the same columns of `sums`, scaled and weighted, to x. All loads are issued before the first is used.
  DISTMK_FN float add_normalized_cols(float* x, const float* weight, float* sums, float scale, uint32_t col) const {
    uint32_t cols[ITEMS_IN_FLIGHT];
    Vector old[ITEMS_IN_FLIGHT], weights[ITEMS_IN_FLIGHT];
#pragma unroll
    for (uint32_t j = 0; j < ITEMS_IN_FLIGHT; ++j) {
      cols[j] = col + j * STEP < args_.k ? col + j * STEP : col;
      load_if(args_.accumulates, x + cols[j], old[j]);
      load_if(true, weight + cols[j], weights[j]);
    }
    float squares = 0.0f;
#pragma unroll
    for (uint32_t j = 0; j < ITEMS_IN_FLIGHT; ++j) {
      if (col + j * STEP >= args_.k) break;
      auto* sum = reinterpret_cast<Vector*>(sums + cols[j]);
      *sum = add_product(old[j], *sum, scale, weights[j]);
      *reinterpret_cast<Vector*>(x + cols[j]) = *sum;
      squares += square(*sum);
    }
    return squares;
  }
  // Adds a rank's splits of k. MAX_K_SPLITS splits are loaded together.
  DISTMK_FN void add_rank_parts(const float* rank_parts, const uint32_t (&cols)[ITEMS_IN_FLIGHT],
                                Vector (&sums)[ITEMS_IN_FLIGHT]) const {
    Vector loaded[MAX_K_SPLITS][ITEMS_IN_FLIGHT];
#pragma unroll
    for (uint32_t split = 0; split < MAX_K_SPLITS; ++split)
#pragma unroll
      for (uint32_t j = 0; j < ITEMS_IN_FLIGHT; ++j)
        load_if(split < args_.num_k_splits, rank_parts + uint64_t{split} * args_.k + cols[j], loaded[split][j]);
#pragma unroll
    for (uint32_t split = 0; split < MAX_K_SPLITS; ++split)
#pragma unroll
      for (uint32_t j = 0; j < ITEMS_IN_FLIGHT; ++j)
        if (split < args_.num_k_splits) sums[j] = sum(sums[j], loaded[split][j]);
  }
};

template <class Vector, bool POST_NORM>
DISTMK_FN void reduce_rows(Context& context, const ReduceRowsArgs& args, const WorkerRows& rows, uint32_t first_row) {
  const RowReduction<Vector, POST_NORM> sums(context, args, rows, first_row);
  const auto fitting = static_cast<uint32_t>(overlay_bytes(Overlay::SUMS) / sizeof(float)) / args.k;
  const uint32_t at_once = min(fitting, SUMMED_ROWS);
  mark(Mark::PREPARED);
  if (!context.inputs_ready()) return;
  for (uint32_t first = 0; first < rows.count; first += at_once) {
    const uint32_t end = min(first + at_once, rows.count);
    if (first) context.team.sync();  // all warps have read the last rows' sums of squares
    mark(Mark::INPUTS);
    sums.add_up(first, end);
    mark(Mark::LAST);
    context.team.sync();
    if constexpr (POST_NORM) {
      sums.add_normalized(first, end);
      context.team.sync();
    }
    mark(Mark::MET);
    sums.store(first, end);
  }
}
static_assert(2 * SUMMED_ROWS * NUM_WARPS * sizeof(float) <= overlay_bytes(Overlay::SQUARES), "");

template <class Vector>
DISTMK_FN void reduce_rows(Context& context, const ReduceRowsArgs& args, const WorkerRows& rows, uint32_t first_row) {
  if (args.post_norm)
    reduce_rows<Vector, true>(context, args, rows, first_row);
  else
    reduce_rows<Vector, false>(context, args, rows, first_row);
}

}  // namespace jobs

DISTMK_FN void body_embed_rows(Context& context, const EmbedRowsArgs& args) {
  const uint32_t num_rows = context.batch(args.batch)->num_job_rows;
  const jobs::WorkerRows rows(context, num_rows);
  if (!rows.count) return;
  if (args.k % 8 == 0 && args.out_stride % 4 == 0 && is_aligned(context.at<void>(args.table)) &&
      is_aligned(context.at<void>(args.out)))
    jobs::embed_rows<jobs::EmbeddedChunk>(context, args, rows, num_rows);
  else
    jobs::embed_rows<jobs::EmbeddedElement>(context, args, rows, num_rows);
}

DISTMK_FN void body_reduce_rows(Context& context, const ReduceRowsArgs& args) {
  if (!context.begin_prologue()) return;
  const uint32_t num_rows = context.batch(args.batch)->num_job_rows;
  const uint32_t share = rows_per_rank(num_rows, args.num_ranks), first_row = min(context.rank() * share, num_rows);
  const jobs::WorkerRows rows(context, min(share, num_rows - first_row));
  if (args.k % 4 == 0 && is_aligned(context.at<void>(args.parts)) && is_aligned(context.at<void>(args.x)) &&
      is_aligned(context.at<void>(args.out)) && is_aligned(context.at<void>(args.post_norm)) &&
      (!HAS_PACKED_WEIGHTS || is_aligned(context.at<void>(args.input_norm))))
    jobs::reduce_rows<float4>(context, args, rows, first_row);
  else
    jobs::reduce_rows<float>(context, args, rows, first_row);
}

}  // namespace distmk
