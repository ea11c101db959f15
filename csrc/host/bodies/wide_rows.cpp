// Row by row in a wide iteration, on the host (distmk/tasks/wide_rows.py). Workers share the rows, a part each.
#include <algorithm>
#include <cmath>

#include "host/bodies/wide_shares.h"
#include "host/simd.h"
#include "runtime/argmax.h"

namespace distmk {

namespace {

struct RowTag;
struct RoundedTag;

// Calls run(row) for the worker's share of `count` rows.
template <class Run>
void run_rows(Context& context, uint32_t count, const Run& run) {
  const uint32_t shares = num_shares(context);
  run_shares(context, shares, [&](uint32_t index) {
    const Range rows = share(count, index, shares);
    for (uint32_t row = rows.begin; row < rows.end; ++row) run(row);
  });
}

// Copies a row of k columns between activations, in chunks of 8, which both layouts keep together.
void copy_row(uint16_t* out, uint32_t out_row, const uint16_t* x, uint32_t x_row, uint32_t k, bool tiled) {
  const uint32_t step = tiled ? 8 : k;
  for (uint32_t col = 0; col < k; col += step)
    memcpy(out + activation_offset(out_row, col, k, tiled), x + activation_offset(x_row, col, k, tiled),
           std::min(step, k - col) * sizeof(uint16_t));
}

// The terms of a row's sum, rank by rank and split by split.
void add_parts(float* __restrict sum, const float* parts, const WideSumArgs& args) {
  for (uint32_t rank = 0; rank < args.num_ranks; ++rank)
    for (uint32_t split = 0; split < args.num_splits; ++split) {
      const float* __restrict part = parts + (uint64_t{rank} * args.slots_per_rank + split) * args.k;
      for (uint32_t i = 0; i < args.k; ++i) sum[i] += part[i];
    }
}

float over_rms(const float* row, const WideSumArgs& args) {
  return 1.0f / std::sqrt(simd::sum_squares(row, args.k) / static_cast<float>(args.k) + args.eps);
}

}  // namespace

void body_wide_embed(Context& context, const WideEmbedArgs& args) {
  const WideBatch& batch = wide_batch(context, args.batch);
  const uint32_t num_rows = context.batch(args.batch)->num_wide_rows;
  const uint32_t owned = rows_per_rank(num_rows, context.num_ranks());
  const auto* table = context.at<uint16_t>(args.table);
  run_rows(context, num_rows, [&](uint32_t row) {
    float* out = on_rank<float>(context, row / owned, args.out) + uint64_t{row % owned} * args.out_stride;
    const auto token = static_cast<uint32_t>(batch.tokens[row]);
    if (token >= args.first_token && token < args.last_token)
      simd::from_bf16(out, table + uint64_t{token - args.first_token} * args.k, args.k);
    else
      memset(out, 0, args.k * sizeof(float));
  });
}

void body_wide_sum(Context& context, const WideSumArgs& args) {
  const uint32_t num_rows = context.batch(args.batch)->num_wide_rows, k = args.k;
  const uint32_t owned = rows_per_rank(num_rows, args.num_ranks);
  const uint32_t begin = std::min(owned * context.rank(), num_rows), end = std::min(begin + owned, num_rows);
  float* sum = simd::scratch<RowTag>(k);
  auto* rounded = reinterpret_cast<uint16_t*>(simd::scratch<RoundedTag>((k + 1) / 2));
  run_rows(context, end - begin, [&](uint32_t row) {
    float* __restrict x = context.at<float>(args.x) + uint64_t{row} * k;
    const float* parts = context.at<float>(args.parts) + uint64_t{row} * args.parts_stride;
    const float* post_norm = context.at<float>(args.post_norm);
    if (!args.add) std::fill_n(x, k, 0.0f);
    if (post_norm) {
      std::fill_n(sum, k, 0.0f);
      add_parts(sum, parts, args);
      const float scale = over_rms(sum, args);
      for (uint32_t i = 0; i < k; ++i) x[i] += sum[i] * scale * post_norm[i];
    } else {
      add_parts(x, parts, args);
    }
    const float scale = args.unnormalized ? 1.0f : over_rms(x, args);
    for (uint32_t i = 0; i < k; ++i) sum[i] = x[i] * scale;
    simd::to_bf16(rounded, sum, k);
    for (uint32_t rank = 0; rank < args.num_ranks; ++rank) {
      auto* out = on_rank<uint16_t>(context, rank, args.out);
      for (uint32_t col = 0, step = args.tiled ? 8 : k; col < k; col += step)
        memcpy(out + activation_offset(begin + row, col, k, args.tiled), rounded + col,
               std::min(step, k - col) * sizeof(uint16_t));
    }
  });
}

void body_select_rows(Context& context, const SelectRowsArgs& args) {
  const WideBatch& batch = wide_batch(context, args.batch);
  const auto* x = context.at<uint16_t>(args.x);
  run_rows(context, context.batch(args.batch)->num_rows, [&](uint32_t row) {
    copy_row(context.at<uint16_t>(args.out), row, x, batch.sampled[row], args.k, args.tiled);
  });
}

void body_argmax_rows(Context& context, const ArgmaxRowsArgs& args) {
  const uint32_t num_rows = context.batch(args.batch)->num_rows;
  auto* out = context.at<Candidate>(args.out);
  run_rows(context, args.num_parts, [&](uint32_t part) {
    const auto begin = static_cast<uint32_t>(uint64_t{args.n} * part / args.num_parts);
    const auto end = static_cast<uint32_t>(uint64_t{args.n} * (part + 1) / args.num_parts);
    for (uint32_t row = 0; row < num_rows; ++row) {
      const float* logits = context.at<float>(args.logits) + uint64_t{row} * args.stride;
      Candidate best{-INFINITY, -1};
      for (uint32_t i = begin; i < end; ++i)
        best = better_of(best, {logits[i], static_cast<int32_t>(args.first_token + i)});
      out[uint64_t{part} * args.num_rows + row] = best;
    }
  });
}

}  // namespace distmk
