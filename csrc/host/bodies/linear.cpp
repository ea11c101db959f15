#include <algorithm>
#include <cmath>

#include "host/bodies/matmul.h"
#include "runtime/argmax.h"
#include "runtime/context.h"
#include "runtime/splits.h"

namespace distmk {

using namespace simd;

namespace {

struct WideTag;
struct PartTag;
struct XTag;
struct YTag;

// The rows a linear task computes, and where the plain product of each goes.
struct Rows {
  uint32_t count = 0;
  uint32_t index[MAX_ROWS];
  float* y[MAX_ROWS];
  float scale[MAX_ROWS];  // of the product: 1/rms of the row of x, where it is normalized
};

Rows choose_rows(const Batch* batch, bool sampled_only) {
  Rows rows;
  const uint32_t num_rows = batch ? batch->num_rows : 1;
  for (uint32_t r = 0; r < num_rows; ++r)
    if (!sampled_only || !batch || batch->rows[r].sample) rows.index[rows.count++] = r;
  return rows;
}

// A lone row, merged from what attention's splits have left of it, and rounded as a vector would be.
void merge_row(float* x, const Context& context, const LinearArgs& args, const BatchRun& run) {
  const uint32_t num_splits = Splits::of_fused(args, run);
  const auto* fused_partials = context.at<uint16_t>(args.fused_partials);
  float* partials = scratch<PartTag>(args.head_dim);
  for (uint32_t head = 0; head < args.k / args.head_dim; ++head, x += args.head_dim) {
    const auto split_at = [&](uint32_t s) {
      return fused_partials + fused_partial_begin(head, s, args.max_splits, args.head_dim);
    };
    const auto weight_of = [&](uint32_t s) {
      float found;
      memcpy(&found, split_at(s), sizeof found);
      return found;
    };
    float max = -INFINITY, total = 0.0f;
    for (uint32_t s = 0; s < num_splits; ++s) max = std::max(max, weight_of(s));
    std::fill(x, x + args.head_dim, 0.0f);
    for (uint32_t s = 0; s < num_splits; ++s) {
      const float weight = std::exp(weight_of(s) - max);
      total += weight;
      from_bf16(partials, split_at(s) + FUSED_PARTIAL_HEADER, args.head_dim);
      for (uint32_t d = 0; d < args.head_dim; ++d) x[d] += weight * partials[d];
    }
    for (uint32_t d = 0; d < args.head_dim; ++d) x[d] = from_bf16(to_bf16(x[d] / total));
  }
}

PackedRows pack(const Context& context, const LinearArgs& args, Rows& rows) {
  PackedRows packed(scratch<XTag>(PackedRows::num_floats(rows.count, args.k)), rows.count, args.k);
  float* x = scratch<WideTag>(args.k);
  const Batch* batch = context.at<Batch>(args.batch);
  for (uint32_t i = 0; i < rows.count; ++i) {
    if (args.fused_partials && fuses_combine(args, batch->num_rows, batch->runs[0]))
      merge_row(x, context, args, batch->runs[0]);
    else
      from_bf16(x, context.at<uint16_t>(args.x) + uint64_t{rows.index[i]} * args.x_stride, args.k);
    if (args.normalized)
      rows.scale[i] = 1.0f / std::sqrt(sum_squares(x, args.k) / static_cast<float>(args.k) + args.eps);
    packed.set(i, x, 1.0f);
  }
  return packed;
}

// Where nothing is done to the product but adding the bias it is computed in place, else in scratch.
void place_product(const Context& context, const LinearArgs& args, uint32_t num_cols, Rows& rows) {
  float* base;
  uint64_t stride;
  switch (static_cast<Epilogue>(args.epilogue)) {
    case Epilogue::STORE:
      base = context.at<float>(args.out);
      stride = args.out_stride;
      break;
    case Epilogue::PUSH:
      base = context.at<float>(args.out);
      stride = args.n;
      break;
    case Epilogue::ARGMAX:
      base = args.logits ? context.at<float>(args.logits) : scratch<YTag>(uint64_t{rows.count} * num_cols);
      stride = args.logits ? args.logits_stride : num_cols;
      break;
    default:
      base = scratch<YTag>(uint64_t{rows.count} * num_cols);
      stride = num_cols;
  }
  const bool by_index = args.epilogue != static_cast<uint32_t>(Epilogue::ARGMAX) || args.logits;
  for (uint32_t i = 0; i < rows.count; ++i) rows.y[i] = base + stride * (by_index ? rows.index[i] : i);
}

void scale_row(float* y, float scale, uint32_t n) {
  for (uint32_t j = 0; j < n; ++j) y[j] *= scale;
}

void add_row(float* __restrict y, const float* __restrict x, uint32_t n) {
  for (uint32_t j = 0; j < n; ++j) y[j] += x[j];
}

// out = silu(gate) * up; out may be gate
void swiglu_row(float* out, const float* gate, const float* up, uint32_t n) {
  uint32_t j = 0;
  for (; j + LANES <= n; j += LANES) {
    const Vec g = load(gate + j);
    store(out + j, g / (exp_of(-g) + 1.0f) * load(up + j));
  }
  for (; j < n; ++j) out[j] = gate[j] / (1.0f + std::exp(-gate[j])) * up[j];
}

Candidate best_of(const float* y, uint32_t n, uint32_t first_token) {
  Candidate best{-INFINITY, -1};
  for (uint32_t j = 0; j < n; ++j) best = better_of(best, {y[j], static_cast<int32_t>(first_token + j)});
  return best;
}

void write_candidates(const Context& context, const LinearArgs& args, const Rows& rows) {
  auto* out = context.at<Candidate>(args.out);
  for (uint32_t r = 0; r < MAX_ROWS; ++r) out[r] = {-INFINITY, -1};
  for (uint32_t i = 0; i < rows.count; ++i) out[rows.index[i]] = best_of(rows.y[i], args.n, args.first_token);
}

}  // namespace

void body_linear(Context& context, const LinearArgs& args) {
  const auto epilogue = static_cast<Epilogue>(args.epilogue);
  const uint32_t num_cols = epilogue == Epilogue::SWIGLU ? 2 * args.n : args.n;
  Rows rows = choose_rows(context.at<Batch>(args.batch), epilogue == Epilogue::ARGMAX);
  place_product(context, args, num_cols, rows);
  if (rows.count) matmul(context.at<uint16_t>(args.weight), num_cols, pack(context, args, rows), rows.y, 0);
  if (args.normalized)
    for (uint32_t i = 0; i < rows.count; ++i) scale_row(rows.y[i], rows.scale[i], num_cols);
  if (const float* bias = context.at<float>(args.bias))
    for (uint32_t i = 0; i < rows.count; ++i) add_row(rows.y[i], bias, num_cols);

  float* out = context.at<float>(args.out);
  switch (epilogue) {
    case Epilogue::ADD:
      for (uint32_t i = 0; i < rows.count; ++i) add_row(out + uint64_t{i} * args.out_stride, rows.y[i], args.n);
      [[fallthrough]];
    case Epilogue::STORE:
      for (uint32_t i = 0; args.out_bf16 && i < rows.count; ++i)
        to_bf16(context.at<uint16_t>(args.out_bf16) + uint64_t{i} * args.out_bf16_stride,
                out + uint64_t{i} * args.out_stride, args.n);
      if (args.out_bf16)
        clear(context.at<uint16_t>(args.reset), rows.count, args.out_bf16_stride, args.n);
      else
        clear(context.at<float>(args.reset), rows.count, args.out_stride, args.n);
      break;
    case Epilogue::SWIGLU:
      for (uint32_t i = 0; i < rows.count; ++i) {
        swiglu_row(rows.y[i], rows.y[i], rows.y[i] + args.n, args.n);
        to_bf16(context.at<uint16_t>(args.out) + uint64_t{i} * args.out_stride, rows.y[i], args.n);
      }
      clear(context.at<uint16_t>(args.reset), rows.count, args.out_stride, args.n);
      break;
    case Epilogue::PUSH:
      for (uint32_t rank = 0; rank < context.num_ranks(); ++rank)
        if (rank != context.rank()) context.push(rank, args.out, out, uint64_t{rows.count} * args.n * sizeof(float));
      break;
    case Epilogue::ARGMAX:
      write_candidates(context, args, rows);
      break;
  }
}

}  // namespace distmk
