// Epilogue of a GEMM in jobs (linear_jobs.cuh): stores a job's output from shared to global memory, one token per warp.
// The job's output features are consecutive, although M tiles with fewer than 16 rows leave gaps between their rows.
#pragma once
#include "device/jobs/mainloop.cuh"
#include "device/linear/epilogue.cuh"
#include "runtime/job_batch.h"

namespace distmk {
namespace jobs {

DISTMK_FN uint32_t num_features(const LinearJobsArgs& args) {
  return is_paired(args) ? args.num_rows / 2 : args.num_rows;
}

// Fills the table of a job's output features, one row per thread. The output begins `begin_bytes` after the stages'
// beginning. A job that has no features has one entry, as FeaturePair reads the first one in place of those that do not
// exist.
DISTMK_FN void write_features(const JobPlan& job, uint32_t begin_bytes, const float* bias, FeatureTable& table) {
  const uint32_t row = threadIdx.x, in_tile = row % M_TILE;
  if (row / M_TILE >= job.num_tiles) return;
  const JobTile tile = job.tiles[row / M_TILE];
  const uint32_t at = begin_bytes / sizeof(float) + row;
  if (row == 0 && !job.features.count) table[0] = {at, at, 0.0f, 0.0f};
  if (in_tile >= tile.features.count) return;
  Feature found{at, at + tile.features.count, 0.0f, 0.0f};
  if (bias && job.k_split == 0) found.bias = bias[tile.bias + in_tile], found.up_bias = bias[tile.up_bias + in_tile];
  table[tile.features.begin + in_tile - job.features.begin] = found;
}

DISTMK_FN void store_element(__nv_bfloat16* at, float v) { *at = __float2bfloat16_rn(v); }
DISTMK_FN void store_element(float* at, float v) { *at = v; }
DISTMK_FN void store_pair(__nv_bfloat16* at, float a, float b) { *reinterpret_cast<uint32_t*>(at) = pack_bf16(a, b); }
DISTMK_FN void store_pair(float* at, float a, float b) { *reinterpret_cast<float2*>(at) = {a, b}; }

// Two adjacent features, the first one even, that a lane stores for all tokens of its warp. They do not depend on the
// token. The upper half of the lanes reads the second feature first, which gives fewer bank conflicts.
template <Epilogue EPILOGUE>
class FeaturePair {
  static constexpr bool PAIRED = is_gated(EPILOGUE);

 public:
  DISTMK_FN FeaturePair(const LinearJobsArgs& args, const FeatureTable& table, const FeatureRange& features,
                        uint32_t f) {
    if constexpr (EPILOGUE == Epilogue::LOGITS) softcap_ = args.softcap;
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t index = f + (i ^ is_upper()) - features.begin;  // wraps around for features before the first
      known_[i] = index < features.count;
      const Feature& feature = table[known_[i] ? index : 0];
      const uint32_t swizzle = output_swizzle(threadIdx.x / 32);
      row_[i] = feature.row ^ swizzle, bias_[i] = feature.bias;
      if constexpr (PAIRED) up_row_[i] = feature.up_row ^ swizzle, up_bias_[i] = feature.up_bias;
    }
  }
  // The two values of one of the warp's tokens; zero for a feature that does not exist.
  DISTMK_FN float2 of(uint32_t token) const {
    const float first = value(token, 0), second = value(token, 1);
    return is_upper() ? float2{second, first} : float2{first, second};
  }

 private:
  uint32_t row_[2], up_row_[2];
  float bias_[2], up_bias_[2];
  bool known_[2];
  float softcap_;

  DISTMK_FN static uint32_t is_upper() { return threadIdx.x / 16 % 2; }
  DISTMK_FN float value(uint32_t token, uint32_t i) const {
    float v = output_of(token)[row_[i]] + bias_[i];
    if constexpr (PAIRED) {
      const float up = output_of(token)[up_row_[i]] + up_bias_[i];
      v = gated<BaseE>(EPILOGUE, v, up);
    }
    if constexpr (EPILOGUE == Epilogue::LOGITS) v = softcapped<BaseE>(v, softcap_);
    return known_[i] ? v : 0.0f;
  }
};

// A warp takes every NUM_WARPS-th token and works on UNROLL of them at a time. All its tokens have the same swizzle, in
// the output and in activations.
constexpr uint32_t UNROLL = 4;
static_assert(NUM_WARPS % 8 == 0 && 32 % (UNROLL * NUM_WARPS) == 0, "");

// A range of the N tile's tokens.
struct TokenRange {
  uint32_t begin, end;
};

// Stores the features of a job, and zeros behind them up to `stored_end`. `at(token, f)`: address of feature f of a
// token; features f and f + 1 of an even f are adjacent. `step`: distance in elements from a token to the warp's next
// one.
template <Epilogue EPILOGUE, class At>
DISTMK_FN void store_features(const LinearJobsArgs& args, const FeatureTable& table, const FeatureRange& features,
                              uint32_t stored_end, const TokenRange& tokens, uint64_t step, const At& at) {
  const uint32_t first = tokens.begin / NUM_WARPS / UNROLL * UNROLL * NUM_WARPS + threadIdx.x / 32;
#pragma unroll 1
  for (uint32_t f = features.begin / 2 * 2 + threadIdx.x % 32 * 2; f < stored_end; f += 64) {
    const FeaturePair<EPILOGUE> pair(args, table, features, f);
    const bool stores_first = f >= features.begin, stores_second = f + 1 < stored_end;
    auto* to = at(first, f);
    const bool as_pair =
        stores_first && stores_second && step % 2 == 0 && reinterpret_cast<uint64_t>(to) % (2 * sizeof(*to)) == 0;
#pragma unroll 1
    for (uint32_t token = first; token < tokens.end; token += UNROLL * NUM_WARPS, to += UNROLL * step) {
      float2 v[UNROLL];
#pragma unroll
      for (uint32_t i = 0; i < UNROLL; ++i) v[i] = pair.of(token + i * NUM_WARPS);
#pragma unroll
      for (uint32_t i = 0; i < UNROLL; ++i) {
        if (token + i * NUM_WARPS - tokens.begin >= tokens.end - tokens.begin) continue;
        if (as_pair) {
          store_pair(to + i * step, v[i].x, v[i].y);
        } else {
          if (stores_first) store_element(to + i * step, v[i].x);
          if (stores_second) store_element(to + i * step + 1, v[i].y);
        }
      }
    }
  }
}

// Stores to the parts of the rows' owners. An owner that is not peer-mapped is skipped: programs with such ranks have
// no job iterations (distmk/lower/jobs.py).
DISTMK_FN void store_parts(const Context& context, const LinearJobsArgs& args, const JobPlan& job,
                           const FeatureTable& table, const FeatureRange& features, uint32_t num_tokens) {
  const uint32_t per_rank = rows_per_rank(num_tokens, context.num_ranks()), job_end = job.first_token + job.num_tokens;
  uint32_t owner = job.first_token / per_rank;
#pragma unroll 1
  for (uint32_t begin = owner * per_rank; begin < job_end; ++owner, begin += per_rank) {
    float* out = on_rank<float>(context, owner, args.out);
    if (!out) continue;
    const TokenRange owned{max(begin, job.first_token) - job.first_token,
                           min(begin + per_rank, job_end) - job.first_token};
    out += uint64_t{args.first_part + job.k_split} * args.num_rows;
    const int64_t first_row = int64_t{job.first_token} - begin;  // from the owner's first row; may be negative
    store_features<Epilogue::PARTS>(
        args, table, features, features.end(), owned, uint64_t{args.out_stride} * NUM_WARPS,
        [&](uint32_t token, uint32_t f) { return out + (first_row + token) * int64_t{args.out_stride} + f; });
  }
}

// Stores the activations of a gated matrix.
template <Epilogue EPILOGUE>
DISTMK_FN void store_gated(const Context& context, const LinearJobsArgs& args, const JobPlan& job,
                           const FeatureTable& table, const FeatureRange& features) {
  auto* out = context.at<__nv_bfloat16>(args.out);
  const uint32_t end = features.end(), tiles = static_cast<uint32_t>(ActivationLayout::TILES);
  const uint32_t layout = HAS_PACKED_WEIGHTS ? args.out_layout : tiles;
  // The last block of activations is padded with zeros.
  const uint32_t stored_end = end < num_features(args)
                                  ? end
                                  : (end + ACTIVATION_BLOCK_COLS - 1) / ACTIVATION_BLOCK_COLS * ACTIVATION_BLOCK_COLS;
  store_features<EPILOGUE>(args, table, features, stored_end, {0, job.num_tokens}, NUM_WARPS * ACTIVATION_BLOCK_COLS,
                           [&](uint32_t token, uint32_t f) {
                             return out + activation_offset(job.first_token + token, f, args.out_stride, layout);
                           });
}

// Stores all tokens of a job.
DISTMK_FN void store_job(const Context& context, const LinearJobsArgs& args, const JobPlan& job,
                         const FeatureTable& table, uint32_t num_tokens) {
  const TokenRange all{0, job.num_tokens};
  const FeatureRange features = job.features;
  const uint32_t end = features.end();
  const uint64_t stride = args.out_stride, first_row = job.first_token;
  switch (static_cast<Epilogue>(args.epilogue)) {
#define DISTMK_STORE_GATED(NAME) \
  case Epilogue::NAME:           \
    return store_gated<Epilogue::NAME>(context, args, job, table, features);
    DISTMK_GATED_EPILOGUES(DISTMK_STORE_GATED)
#undef DISTMK_STORE_GATED
    case Epilogue::STORE: {
      auto* out = context.at<__nv_bfloat16>(args.out) + first_row * stride;
      return store_features<Epilogue::STORE>(args, table, features, end, all, stride * NUM_WARPS,
                                             [&](uint32_t token, uint32_t f) { return out + token * stride + f; });
    }
    case Epilogue::LOGITS: {
      auto* out = context.at<float>(args.out) + first_row * stride;
      return store_features<Epilogue::LOGITS>(args, table, features, end, all, stride * NUM_WARPS,
                                              [&](uint32_t token, uint32_t f) { return out + token * stride + f; });
    }
    case Epilogue::PARTS:
      return store_parts(context, args, job, table, features, num_tokens);
  }
}

}  // namespace jobs
}  // namespace distmk
