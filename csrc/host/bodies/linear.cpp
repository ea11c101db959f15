// Linear layers on the host: out[n, m] = epilogue(sum over k of W[m, k] X[n, k]) for a slab of weight rows m and all
// tokens n, bf16 weights and activations, float32 sums. The formulas of each epilogue are in
// device/linear/epilogue.cuh. Here a slab is row-major, not packed in tiles; that of a gated task is its gate rows,
// then its up rows.
#include <algorithm>
#include <cmath>

#include "host/bodies/matmul.h"
#include "runtime/argmax.h"
#include "runtime/context.h"
#include "runtime/gated.h"
#include "runtime/log_sum_exp.h"
#include "runtime/row_sample.h"
#include "runtime/splits.h"

namespace distmk {

using namespace simd;

namespace {

struct InputTag;
struct PartialTag;
struct PackedTag;
struct ProductTag;

// The tokens that a task multiplies, and where the product of each goes.
struct Tokens {
  uint32_t count = 0;
  uint32_t row[MAX_ROWS];  // of the batch
  float* product[MAX_ROWS];
  float norm_scale[MAX_ROWS];  // 1 / rms of the token's activations, for normalized tasks
};

Tokens select_tokens(const Batch* batch, bool sampled_only) {
  Tokens tokens;
  const uint32_t num_rows = batch ? batch->num_rows : 1;
  for (uint32_t row = 0; row < num_rows; ++row)
    if (!sampled_only || !batch || batch->rows[row].sample) tokens.row[tokens.count++] = row;
  return tokens;
}

// The fused combine: x[k] = sum_s w_s o_s[k] / sum_s w_s of the normalized partials that attention's splits left
// (runtime/log_sum_exp.h). Rounded to bf16, as the separate combine task would.
void combine_partials(float* x, const Context& context, const LinearArgs& args, const BatchRun& run) {
  const uint32_t num_splits = Splits::of_fused(args, run);
  const auto* partials = context.at<uint16_t>(args.fused_partials);
  float* elements = scratch<PartialTag>(args.head_dim);
  for (uint32_t head = 0; head < args.k / args.head_dim; ++head, x += args.head_dim) {
    const auto partial = [&](uint32_t split) {
      return partials + fused_partial_begin(head, split, args.max_splits, args.head_dim);
    };
    const auto log_sum_exp = [&](uint32_t split) {
      float value;
      memcpy(&value, partial(split), sizeof value);
      return value;
    };
    float max = -INFINITY, sum = 0.0f;
    for (uint32_t s = 0; s < num_splits; ++s) max = std::max(max, log_sum_exp(s));
    std::fill(x, x + args.head_dim, 0.0f);
    for (uint32_t s = 0; s < num_splits; ++s) {
      const float weight = combine_weight(log_sum_exp(s), max);
      sum += weight;
      from_bf16(elements, partial(s) + FUSED_PARTIAL_HEADER, args.head_dim);
      for (uint32_t d = 0; d < args.head_dim; ++d) x[d] += weight * elements[d];
    }
    const float scale = normalizer(sum);
    for (uint32_t d = 0; d < args.head_dim; ++d) x[d] = from_bf16(to_bf16(x[d] * scale));
  }
}

PackedRows pack_activations(const Context& context, const LinearArgs& args, Tokens& tokens) {
  auto packed = PackedRows::in_scratch<PackedTag>(tokens.count, args.k, Elements::BF16);
  float* x = scratch<InputTag>(args.k);
  const Batch* batch = context.at<Batch>(args.batch);
  for (uint32_t i = 0; i < tokens.count; ++i) {
    if (args.fused_partials && fuses_combine(args, batch->num_rows, batch->runs[0]))
      combine_partials(x, context, args, batch->runs[0]);
    else
      from_bf16(x, context.at<uint16_t>(args.x) + uint64_t{tokens.row[i]} * args.x_stride, args.k);
    if (args.normalized)
      tokens.norm_scale[i] = 1.0f / std::sqrt(sum_squares(x, args.k) / static_cast<float>(args.k) + args.eps);
    packed.set(i, x, 1.0f);
  }
  packed.finish();
  return packed;
}

// ARGMAX: of the rows that need their logits, if not of all.
bool stores_product(const Context& context, const LinearArgs& args, uint32_t row) {
  const Batch* batch = context.at<Batch>(args.batch);
  return static_cast<Epilogue>(args.epilogue) != Epilogue::ARGMAX || args.keeps_logits || !batch ||
         needs_logits(batch->rows[row]);
}

// Products are computed in place where the epilogue does no more than add the bias, in scratch memory otherwise.
void place_products(const Context& context, const LinearArgs& args, uint32_t num_cols, Tokens& tokens) {
  float* matrix = nullptr;
  uint64_t stride = 0;
  switch (static_cast<Epilogue>(args.epilogue)) {
    case Epilogue::STORE:
      matrix = context.at<float>(args.out);
      stride = args.out_stride;
      break;
    case Epilogue::PUSH:
      matrix = context.at<float>(args.out);
      stride = args.n;
      break;
    case Epilogue::ARGMAX:
      matrix = context.at<float>(args.logits);  // null: logits are not stored
      stride = args.logits_stride;
      break;
    default:
      break;
  }
  const bool packs = !matrix || static_cast<Epilogue>(args.epilogue) == Epilogue::ARGMAX;
  float* packed = packs ? scratch<ProductTag>(uint64_t{tokens.count} * num_cols) : nullptr;
  for (uint32_t i = 0; i < tokens.count; ++i)
    tokens.product[i] = matrix && stores_product(context, args, tokens.row[i]) ? matrix + stride * tokens.row[i]
                                                                               : packed + uint64_t{i} * num_cols;
}

void scale_row(float* y, float scale, uint32_t n) {
  for (uint32_t j = 0; j < n; ++j) y[j] *= scale;
}

void add_row(float* __restrict y, const float* __restrict x, uint32_t n) {
  for (uint32_t j = 0; j < n; ++j) y[j] += x[j];
}

// out = gate / (1 + e^-z(gate)) * up (runtime/gated.h); out may be gate.
template <class Exponent>
void gated_row(float* out, const float* gate, const float* up, uint32_t n, const Exponent& z) {
  uint32_t j = 0;
  for (; j + LANES <= n; j += LANES) {
    const Vec g = load(gate + j);
    store(out + j, g / (exp_of(-z(g)) + 1.0f) * load(up + j));
  }
  for (; j < n; ++j) out[j] = gate[j] / (1.0f + std::exp(-z(gate[j]))) * up[j];
}

Candidate argmax(const float* logits, uint32_t n, uint32_t first_token) {
  Candidate best{-INFINITY, -1};
  for (uint32_t j = 0; j < n; ++j) best = better_of(best, {logits[j], static_cast<int32_t>(first_token + j)});
  return best;
}

void write_candidates(const Context& context, const LinearArgs& args, const Tokens& tokens) {
  auto* out = context.at<Candidate>(args.out);
  for (uint32_t row = 0; row < MAX_ROWS; ++row) out[row] = {-INFINITY, -1};
  for (uint32_t i = 0; i < tokens.count; ++i) out[tokens.row[i]] = argmax(tokens.product[i], args.n, args.first_token);
}

// From the finished products on. All tasks but ARGMAX multiply all tokens, so there tokens.row[i] = i.
void run_epilogue(Context& context, const LinearArgs& args, const Tokens& tokens) {
  float* out = context.at<float>(args.out);
  auto* out_bf16 = context.at<uint16_t>(args.out_bf16);
  switch (static_cast<Epilogue>(args.epilogue)) {
    case Epilogue::ADD:
      for (uint32_t i = 0; i < tokens.count; ++i)
        add_row(out + uint64_t{i} * args.out_stride, tokens.product[i], args.n);
      [[fallthrough]];
    case Epilogue::STORE:
      to_bf16_rows(out_bf16, args.out_bf16_stride, out, args.out_stride, tokens.count, args.n);
      if (out_bf16)
        clear(context.at<uint16_t>(args.reset), tokens.count, args.out_bf16_stride, args.n);
      else
        clear(context.at<float>(args.reset), tokens.count, args.out_stride, args.n);
      break;
    case Epilogue::SWIGLU:
    case Epilogue::GEGLU:
      for (uint32_t i = 0; i < tokens.count; ++i) {
        float* gate = tokens.product[i];
        if (static_cast<Epilogue>(args.epilogue) == Epilogue::GEGLU)
          gated_row(gate, gate, gate + args.n, args.n, [](auto x) { return gelu_exponent(x); });
        else
          gated_row(gate, gate, gate + args.n, args.n, [](auto x) { return x; });
        to_bf16(context.at<uint16_t>(args.out) + uint64_t{i} * args.out_stride, gate, args.n);
      }
      clear(context.at<uint16_t>(args.reset), tokens.count, args.out_stride, args.n);
      break;
    case Epilogue::PUSH:
      for (uint32_t rank = 0; rank < context.num_ranks(); ++rank)
        if (rank != context.rank()) context.push(rank, args.out, out, uint64_t{tokens.count} * args.n * sizeof(float));
      break;
    case Epilogue::ARGMAX:
      write_candidates(context, args, tokens);
      for (uint32_t i = 0; i < tokens.count; ++i) softcap(tokens.product[i], args.n, args.softcap);
      break;
  }
}

}  // namespace

void body_linear(Context& context, const LinearArgs& args) {
  const auto epilogue = static_cast<Epilogue>(args.epilogue);
  const uint32_t num_cols = is_gated(epilogue) ? 2 * args.n : args.n;
  Tokens tokens = select_tokens(context.at<Batch>(args.batch), epilogue == Epilogue::ARGMAX);
  place_products(context, args, num_cols, tokens);
  if (tokens.count)
    matmul(context.at<uint16_t>(args.weight), num_cols, pack_activations(context, args, tokens), tokens.product, 0);
  const float* bias = context.at<float>(args.bias);
  for (uint32_t i = 0; i < tokens.count; ++i) {
    if (args.normalized) scale_row(tokens.product[i], tokens.norm_scale[i], num_cols);
    if (bias) add_row(tokens.product[i], bias, num_cols);
  }
  run_epilogue(context, args, tokens);
}

}  // namespace distmk
