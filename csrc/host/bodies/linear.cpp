// Linear layers on the host (product.h). They compute value[n, m] = scale[n] * sum over k of W[m, k] X[n, k] + bias[m]
// for tokens n and weight rows m, followed by the epilogue. The formulas of the epilogues are in
// device/linear/epilogue.cuh. Weights are row-major here, not packed in tiles. A gated task has gate rows, then up
// rows, slab by slab.
#include <algorithm>
#include <numeric>

#include "host/bodies/product.h"
#include "host/bodies/rows.h"
#include "runtime/job_batch.h"
#include "runtime/log_sum_exp.h"
#include "runtime/row_sample.h"
#include "runtime/splits.h"

namespace distmk {

using namespace simd;

namespace {

struct InputTag;
struct PartialTag;
struct PackedTag;

const int32_t* order_of(const Context&, const LinearArgs&) { return nullptr; }
const int32_t* order_of(const Context& context, const ScaledLinearArgs& args) {
  return context.at<int32_t>(args.order);
}

template <class Args>
Weights weights_of(const Context& context, const Args& args) {
  const auto epilogue = static_cast<Epilogue>(args.epilogue);
  return {StoredRows(context.at<uint8_t>(args.weight), args.format, args.k_pitch, args.lead),
          context.at<float>(args.bias),
          order_of(context, args),
          epilogue,
          args.k,
          is_gated(epilogue) ? 2 * args.num_features : args.num_features};
}
Weights weights_of(const Context& context, const LinearJobsArgs& args) {
  return {StoredRows(context.at<uint8_t>(args.weight), args.format, args.k_pitch, args.lead),
          context.at<float>(args.bias),
          context.at<int32_t>(args.order),
          static_cast<Epilogue>(args.epilogue),
          args.k,
          args.num_rows,
          args.num_slabs,
          args.num_reduced,
          args.reduced_rows};
}

// The rows of the batch that a task multiplies.
struct Tokens {
  uint32_t count = 0;
  uint32_t row[MAX_ROWS];
  float scale[MAX_ROWS];  // factor of the token's sums; 1 / rms of its activations in normalized tasks
};

Tokens select_tokens(const Batch* batch, bool sampled_only) {
  Tokens tokens;
  const uint32_t num_rows = batch ? batch->num_rows : 1;
  for (uint32_t row = 0; row < num_rows; ++row)
    if (!sampled_only || !batch || batch->rows[row].sample) tokens.row[tokens.count++] = row;
  return tokens;
}

// The fused combine: x[k] = sum_s w_s o_s[k] / sum_s w_s over the normalized partials that attention's splits left
// (runtime/log_sum_exp.h). It is rounded to bf16 like the output of the separate combine task. Returns false if the row
// is in the task's x instead.
bool combine_partials(float* x, const Context& context, const LinearArgs& args) {
  const Batch* batch = context.at<Batch>(args.batch);
  if (!args.fused_partials || !fuses_combine(args, batch->num_rows, batch->runs[0])) return false;
  const BatchRun& run = batch->runs[0];
  const uint32_t num_splits = Splits::of_fused(args, run);
  const auto* partials = context.at<uint16_t>(args.fused_partials);
  float* elements = scratch<PartialTag>(args.head_dim);
  for (uint32_t head = 0; head < args.k / args.head_dim; ++head, x += args.head_dim) {
    const auto at = [&](uint32_t split) {
      return partials + fused_partial_begin(head, split, args.max_kv_splits, args.head_dim);
    };
    const auto partial = [&](uint32_t split) {
      LogSumExp<BaseE> found{0.0f, 1.0f};
      memcpy(&found.max, at(split), sizeof found.max);
      return found;
    };
    auto total = begin_merge<BaseE>(num_splits, partial);
    std::fill(x, x + args.head_dim, 0.0f);
    for (uint32_t split = 0; split < num_splits; ++split) {
      const float weight = total.add(partial(split));
      from_bf16(elements, at(split) + FUSED_PARTIAL_HEADER, args.head_dim);
      for (uint32_t d = 0; d < args.head_dim; ++d) x[d] += weight * elements[d];
    }
    const float scale = normalizer(total.sum);
    for (uint32_t d = 0; d < args.head_dim; ++d) x[d] = from_bf16(to_bf16(x[d] * scale));
  }
  return true;
}
bool combine_partials(float*, const Context&, const ScaledLinearArgs&) { return false; }

// Factor of a token's sums.
float scale_of(const Context&, const LinearArgs& args, uint32_t, const float* x) {
  return args.applies_rms ? over_rms(x, args.k, args.eps) : 1.0f;
}
float scale_of(const Context& context, const ScaledLinearArgs& args, uint32_t row, const float*) {
  if (!args.x_squares) return args.scale;
  const float* parts = context.at<float>(args.x_squares) + uint64_t{row} * args.x_squares_stride;
  return args.scale * over_rms(std::accumulate(parts, parts + args.num_squares, 0.0f), args.k, args.eps);
}

template <class Args>
FewRows pack_activations(const Context& context, const Args& args, const Weights& weights, Tokens& tokens) {
  auto packed = FewRows::in_scratch<PackedTag>(weights, tokens.count);
  float* x = scratch<InputTag>(args.k);
  for (uint32_t i = 0; i < tokens.count; ++i) {
    if (!combine_partials(x, context, args))
      from_bf16(x, context.at<uint16_t>(args.x) + uint64_t{tokens.row[i]} * args.x_stride, args.k);
    tokens.scale[i] = scale_of(context, args, tokens.row[i], x);
    packed.set(i, x);
  }
  packed.finish();
  return packed;
}

template <class Args>
void store_sums(const Context& context, const Args& args, uint32_t row, const Sums& sums) {
  const auto epilogue = static_cast<Epilogue>(args.epilogue);
  const uint64_t at = uint64_t{row} * (epilogue == Epilogue::PUSH ? args.num_features : args.out_stride) + sums.first;
  if (is_gated(epilogue)) return to_bf16(context.at<uint16_t>(args.out) + at, sums.values, sums.count);
  float* out = context.at<float>(args.out) + at;
  if (epilogue == Epilogue::ARGMAX) {
    Candidate& best = context.at<Candidate>(args.out)[row];
    best = better_of(best, best_of(sums.values, 0, sums.count, args.first_token + sums.first));
    const Batch* batch = context.at<Batch>(args.batch);
    if (!args.logits || !(args.keeps_logits || !batch || needs_logits(batch->rows[row]))) return;
    softcap_row(sums.values, sums.count, args.softcap);
    out = context.at<float>(args.logits) + uint64_t{row} * args.logits_stride + sums.first;
  }
  if (epilogue == Epilogue::ADD)
    add_row(out, sums.values, sums.count);
  else
    memcpy(out, sums.values, sums.count * sizeof(float));
}

// Zeros the rows at `lamport_reset`: the bf16 output of an earlier write in the rotation of buffers or, in a task
// without one, its output.
template <class Args>
void reset_rows(const Context& context, const Args& args, uint32_t num_rows) {
  if (args.out_bf16)
    clear(context.at<uint16_t>(args.lamport_reset), num_rows, args.out_bf16_stride, args.num_features);
  else if (is_gated(static_cast<Epilogue>(args.epilogue)))
    clear(context.at<uint16_t>(args.lamport_reset), num_rows, args.out_stride, args.num_features);
  else
    clear(context.at<float>(args.lamport_reset), num_rows, args.out_stride, args.num_features);
}

// How the workers divide the panels of a product. If there are too few panels, the workers divide the groups of rows,
// too.
struct Grid {
  uint32_t num_cols, num_rows;

  Grid(uint32_t num_panels, uint32_t num_groups, uint32_t num_workers) : num_cols(num_workers), num_rows(1) {
    const auto cost = [&](uint32_t shares) {
      return uint64_t{ceil_div(num_panels, num_workers / shares)} * ceil_div(num_groups, shares);
    };
    for (uint32_t shares = 2; shares <= num_workers; ++shares)
      if (num_workers % shares == 0 && cost(shares) < cost(num_rows)) num_rows = shares;
    num_cols = num_workers / num_rows;
  }
};

float scale_of(const LinearJobsArgs& args) { return args.scale != 0.0f ? args.scale : 1.0f; }

void multiply_all(Context& context, const LinearJobsArgs& args, uint32_t num_rows) {
  const bool is_parts = static_cast<Epilogue>(args.epilogue) == Epilogue::PARTS;
  const uint32_t per_rank = rows_per_rank(num_rows, context.num_ranks());
  float* parts[MAX_RANKS] = {};
  for (uint32_t rank = 0; is_parts && rank < context.num_ranks(); ++rank)
    parts[rank] = on_rank<float>(context, rank, args.out);
  auto* rounded = context.at<uint16_t>(args.out);

  const Weights weights = weights_of(context, args);
  const ManyRows product(weights, context.at<uint16_t>(args.x), num_rows);
  const uint32_t shares = num_shares(context), num_panels = product.num_panels(), num_groups = product.num_groups();
  const Grid grid(num_panels, num_groups, shares);
  run_shares(context, shares * args.num_k_splits, [&](uint32_t index) {
    const uint32_t part = index % shares, split = index / shares;
    // A split has whole blocks.
    const Range blocks = share(ceil_div(args.k, ACTIVATION_BLOCK_COLS), split, args.num_k_splits);
    const auto store = [&](const Sums& sums) __attribute__((always_inline)) {
      sums.finish(weights, scale_of(args), split == 0);
      if (!is_parts) return sums.round_to(rounded + uint64_t{sums.row} * args.out_stride + sums.first);
      float* out = parts[sums.row / per_rank] + uint64_t{sums.row % per_rank} * args.out_stride;
      memcpy(out + uint64_t{args.first_part + split} * args.num_rows + sums.first, sums.values,
             sums.count * sizeof(float));
    };
    product.multiply(
        share(num_panels, part / grid.num_rows, grid.num_cols), share(num_groups, part % grid.num_rows, grid.num_rows),
        {blocks.begin * ACTIVATION_BLOCK_COLS, std::min(blocks.end * ACTIVATION_BLOCK_COLS, args.k)}, store);
  });
}

// The product for sampled rows: few rows, and as many columns as a shard of the vocabulary has tokens. It gives the
// same bits in any iteration.
void multiply_sampled(Context& context, const LinearJobsArgs& args, uint32_t num_rows) {
  const Weights weights = weights_of(context, args);
  const uint32_t shares = num_shares(context);
  run_shares(context, shares, [&](uint32_t index) {
    auto packed = FewRows::in_scratch<PackedTag>(weights, num_rows);
    float* x = scratch<InputTag>(args.k);
    for (uint32_t row = 0; row < num_rows; ++row) {
      from_bf16(x, context.at<uint16_t>(args.x) + uint64_t{row} * args.k, args.k);
      packed.set(row, x);
    }
    packed.finish();
    multiply_few(weights, share(args.num_rows, index, shares), packed, [&](const Sums& sums) {
      sums.finish(weights, scale_of(args), true);
      softcap_row(sums.values, sums.count, args.softcap);
      memcpy(context.at<float>(args.out) + uint64_t{sums.row} * args.out_stride + sums.first, sums.values,
             sums.count * sizeof(float));
    });
  });
}

template <class Args>
void run_linear(Context& context, const Args& args) {
  const auto epilogue = static_cast<Epilogue>(args.epilogue);
  const Weights weights = weights_of(context, args);
  Tokens tokens = select_tokens(context.at<Batch>(args.batch), epilogue == Epilogue::ARGMAX);
  if (epilogue == Epilogue::ARGMAX) std::fill_n(context.at<Candidate>(args.out), MAX_ROWS, Candidate{-INFINITY, -1});
  if (tokens.count)
    multiply_few(weights, {0, args.num_features}, pack_activations(context, args, weights, tokens),
                 [&](const Sums& sums) {
                   sums.finish(weights, tokens.scale[sums.row], true);
                   store_sums(context, args, tokens.row[sums.row], sums);
                 });
  if (epilogue == Epilogue::PUSH) {
    const auto* out = context.at<float>(args.out);
    for (uint32_t rank = 0; rank < context.num_ranks(); ++rank)
      if (rank != context.rank())
        context.push(rank, args.out, out, uint64_t{tokens.count} * args.num_features * sizeof(float));
  } else if (epilogue != Epilogue::ARGMAX) {
    for (uint32_t row = 0; row < tokens.count; ++row)
      round_row(context, args, row, context.at<float>(args.out) + uint64_t{row} * args.out_stride, args.num_features);
    reset_rows(context, args, tokens.count);
  }
}

}  // namespace

void body_linear(Context& context, const LinearArgs& args) { run_linear(context, args); }

// A linear layer whose matrix does not contain the factors around it (distmk/tasks/scaled_linear.py).
void body_scaled_linear(Context& context, const ScaledLinearArgs& args) { run_linear(context, args); }

void body_linear_jobs(Context& context, const LinearJobsArgs& args) {
  if (args.tiled) return;  // packed for a GPU
  const Batch& batch = *context.batch(args.batch);
  if (args.max_sampled_rows)
    multiply_sampled(context, args, batch.num_rows);
  else if (batch.num_job_rows)
    multiply_all(context, args, batch.num_job_rows);
}

}  // namespace distmk
