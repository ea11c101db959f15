// Row-wise tasks on the host: the embedding, norms, sums into the residual stream, the choice of rows and the best of
// their logits. In a job iteration the workers share the rows.
#include "host/bodies/rows.h"

#include <algorithm>

#include "host/bodies/shares.h"
#include "runtime/job_batch.h"

namespace distmk {

namespace {

struct RowTag;
struct RoundedTag;

// Calls copy(offset, first column, number of columns) for each contiguous part of a row of activations: the whole row
// or, if tiled, chunks of 8.
template <class Copy>
void for_each_chunk(uint32_t row, uint32_t k, bool tiled, const Copy& copy) {
  for (uint32_t col = 0, step = tiled ? 8 : k; col < k; col += step)
    copy(activation_offset(row, col, k, tiled), col, std::min(step, k - col));
}

// Adds the terms of a row's sum, in the order of ranks and splits.
void add_parts(float* sum, const float* parts, const ReduceRowsArgs& args) {
  for (uint32_t rank = 0; rank < args.num_ranks; ++rank)
    for (uint32_t split = 0; split < args.num_k_splits; ++split)
      add_row(sum, parts + (uint64_t{rank} * args.parts_per_rank + split) * args.k, args.k);
}

}  // namespace

// device/linear/embed.cuh has the formula.
void body_embed(Context& context, const EmbedArgs& args) {
  const auto& batch = *context.at<Batch>(args.batch);
  const bool push = args.epilogue == static_cast<uint32_t>(Epilogue::PUSH);
  const uint64_t stride = push ? args.num_cols : args.out_stride;
  float* out = context.at<float>(args.out);
  const StoredRows table(context.at<uint8_t>(args.table), args.format, args.k);
  for (uint32_t row = 0; row < batch.num_rows; ++row)
    embed_row(out + row * stride, table, args, batch.rows[row].token, args.col_begin, args.num_cols);
  round_rows(context, args, out, stride, batch.num_rows);
  if (!push) return;
  for (uint32_t rank = 0; rank < context.num_ranks(); ++rank)
    if (rank != context.rank())
      context.push(rank, args.out, out, uint64_t{batch.num_rows} * args.num_cols * sizeof(float));
}

void body_embed_rows(Context& context, const EmbedRowsArgs& args) {
  const JobBatch& batch = job_batch(context, args.batch);
  const uint32_t num_rows = context.batch(args.batch)->num_job_rows;
  const uint32_t owned = rows_per_rank(num_rows, context.num_ranks());
  const StoredRows table(context.at<uint8_t>(args.table), args.format, args.k);
  run_rows(context, num_rows, [&](uint32_t row) {
    embed_row(on_rank<float>(context, row / owned, args.out) + uint64_t{row % owned} * args.out_stride, table, args,
              batch.tokens[row], 0, args.k);
  });
}

// RMSNorm after a row-parallel projection; device/linear/post_norm.cuh has the formula.
void body_post_norm(Context& context, const PostNormArgs& args) {
  const uint32_t num_rows = rows_of(context.batch(args.batch));
  float* x = context.at<float>(args.x);
  for (uint32_t row = 0; row < num_rows; ++row) {
    const float* y = context.at<float>(args.y) + uint64_t{row} * args.y_stride;
    add_normalized(x + uint64_t{row} * args.x_stride, y + args.col_begin, over_rms(y, args.k, args.eps),
                   context.at<float>(args.weight), args.num_cols);
  }
  round_rows(context, args, x, args.x_stride, num_rows);
}

void body_reduce_rows(Context& context, const ReduceRowsArgs& args) {
  const uint32_t num_rows = context.batch(args.batch)->num_job_rows, k = args.k;
  const uint32_t owned = rows_per_rank(num_rows, args.num_ranks);
  const uint32_t begin = std::min(owned * context.rank(), num_rows), end = std::min(begin + owned, num_rows);
  float* sum = simd::scratch<RowTag>(k);
  auto* rounded = reinterpret_cast<uint16_t*>(simd::scratch<RoundedTag>((k + 1) / 2));
  run_rows(context, end - begin, [&](uint32_t row) {
    float* x = context.at<float>(args.x) + uint64_t{row} * k;
    const float* parts = context.at<float>(args.parts) + uint64_t{row} * args.parts_stride;
    if (!args.accumulates) std::fill_n(x, k, 0.0f);
    if (args.post_norm) {
      std::fill_n(sum, k, 0.0f);
      add_parts(sum, parts, args);
      add_normalized(x, sum, over_rms(sum, k, args.eps), context.at<float>(args.post_norm), k);
    } else {
      add_parts(x, parts, args);
    }
    const float scale = args.skips_rms ? 1.0f : over_rms(x, k, args.eps);
    for (uint32_t i = 0; i < k; ++i) sum[i] = x[i] * scale;
    if (const float* norm = context.at<float>(args.input_norm)) multiply_row(sum, norm, k);
    simd::to_bf16(rounded, sum, k);
    for (uint32_t rank = 0; rank < args.num_ranks; ++rank) {
      auto* out = on_rank<uint16_t>(context, rank, args.out);
      for_each_chunk(begin + row, k, args.tiled, [&](uint64_t at, uint32_t col, uint32_t count) {
        memcpy(out + at, rounded + col, count * sizeof(uint16_t));
      });
    }
  });
}

void body_select_rows(Context& context, const SelectRowsArgs& args) {
  const JobBatch& batch = job_batch(context, args.batch);
  auto *x = context.at<uint16_t>(args.x), *out = context.at<uint16_t>(args.out);
  run_rows(context, context.batch(args.batch)->num_rows, [&](uint32_t row) {
    for_each_chunk(row, args.k, args.tiled, [&](uint64_t at, uint32_t col, uint32_t count) {
      memcpy(out + at, x + activation_offset(batch.sampled[row], col, args.k, args.tiled), count * sizeof(uint16_t));
    });
  });
}

void body_argmax_rows(Context& context, const ArgmaxRowsArgs& args) {
  const uint32_t num_rows = context.batch(args.batch)->num_rows;
  auto* out = context.at<Candidate>(args.out);
  run_rows(context, args.num_parts, [&](uint32_t part) {
    const Range cols = share(args.num_cols, part, args.num_parts);
    for (uint32_t row = 0; row < num_rows; ++row)
      out[uint64_t{part} * args.num_rows + row] =
          best_of(context.at<float>(args.logits) + uint64_t{row} * args.stride, cols.begin, cols.end, args.first_token);
  });
}

}  // namespace distmk
