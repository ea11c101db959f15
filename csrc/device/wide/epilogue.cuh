// Epilogue of a wide product: from a job's output in shared memory to global memory, a token a warp. The job's output
// features are consecutive, though M tiles with fewer than 16 rows leave gaps between their rows.
#pragma once
#include "device/linear/epilogue.cuh"
#include "device/wide/mainloop.cuh"
#include "runtime/wide_batch.h"

namespace distmk {
namespace wide {

// Output features of a job.
struct FeatureRange {
  uint32_t begin, count;
};

DISTMK_FN bool is_paired(const WideLinearArgs& args) {
  return args.epilogue == static_cast<uint32_t>(WideEpilogue::SWIGLU);
}
DISTMK_FN uint32_t num_features(const WideLinearArgs& args) {
  return is_paired(args) ? args.num_rows / 2 : args.num_rows;
}

// The features of an M tile. Those of gate and up are in its first half, the rows of up in its second half.
DISTMK_FN FeatureRange features_of(const WideLinearArgs& args, const TileRows& tile) {
  const uint32_t half = is_paired(args) ? 2 : 1;
  return {(tile.slab_begin + min(tile.first, tile.slab_rows)) / half, tile.count / half};
}
DISTMK_FN FeatureRange features_of(const WideLinearArgs& args, const Division& division, const Job& job) {
  const FeatureRange first = features_of(args, division.tile_rows(args, job.first_tile)),
                     last = features_of(args, division.tile_rows(args, job.first_tile + job.num_tiles - 1));
  return {first.begin, last.begin + last.count - first.begin};
}

// A thread a row of the job.
DISTMK_FN void write_features(const Context& context, const WideLinearArgs& args, const Division& division,
                              const Job& job, uint32_t first_feature) {
  const uint32_t row = threadIdx.x, in_tile = row % M_TILE;
  if (row / M_TILE >= job.num_tiles) return;
  const TileRows tile = division.tile_rows(args, job.first_tile + row / M_TILE);
  const FeatureRange features = features_of(args, tile);
  if (in_tile >= features.count) return;
  Feature found{row, row + features.count, 0.0f, 0.0f};
  if (const float* bias = context.at<float>(args.bias); bias && job.split == 0) {
    const uint32_t in_slab = is_paired(args) ? tile.first / 2 + in_tile : tile.first + in_tile;
    found.bias = bias[tile.slab_begin + in_slab];
    if (is_paired(args)) found.up_bias = bias[tile.slab_begin + tile.slab_rows / 2 + in_slab];
  }
  rings().features[features.begin + in_tile - first_feature] = found;
}

DISTMK_FN void store_element(__nv_bfloat16* at, float v) { *at = __float2bfloat16_rn(v); }
DISTMK_FN void store_element(float* at, float v) { *at = v; }
DISTMK_FN void store_pair(__nv_bfloat16* at, float a, float b) { *reinterpret_cast<uint32_t*>(at) = pack_bf16(a, b); }
DISTMK_FN void store_pair(float* at, float a, float b) { *reinterpret_cast<float2*>(at) = {a, b}; }

// What a lane stores of every token: two features, and those 64 and 128 behind them, from an even one on.
class OutputLane {
 public:
  DISTMK_FN OutputLane(const WideLinearArgs& args, const FeatureRange& features)
      : paired_(is_paired(args)), begin_(features.begin), end_(features.begin + features.count), stored_end_(end_) {
    // The last block of activations is filled up with zeros.
    const uint32_t all = num_features(args);
    if (paired_ && end_ == all) stored_end_ = (all + WIDE_COLS - 1) / WIDE_COLS * WIDE_COLS;
  }

  // `at`: where a feature of the token is stored; those of a pair lie side by side.
  template <class At>
  DISTMK_FN void store(uint32_t token, const At& at) const {
    const float* output = output_of(token);
    const uint32_t swizzle = output_swizzle(token);
#pragma unroll 1
    for (uint32_t f = begin_ / 2 * 2 + threadIdx.x % 32 * 2; f < stored_end_; f += 64) {
      const bool both = f >= begin_ && f + 1 < stored_end_;
      auto* to = at(f);
      const float a = value(output, swizzle, f), b = value(output, swizzle, f + 1);
      if (both && reinterpret_cast<uint64_t>(to) % (2 * sizeof(*to)) == 0) {
        store_pair(to, a, b);
      } else {
        if (f >= begin_) store_element(to, a);
        if (f + 1 < stored_end_) store_element(to + 1, b);
      }
    }
  }

 private:
  const bool paired_;
  uint32_t begin_, end_, stored_end_;

  DISTMK_FN float value(const float* output, uint32_t swizzle, uint32_t f) const {
    if (f < begin_ || f >= end_) return 0.0f;
    const Feature& feature = rings().features[f - begin_];
    const float sum = output[feature.row ^ swizzle] + feature.bias;
    return paired_ ? linear::swiglu(sum, output[feature.up_row ^ swizzle] + feature.up_bias) : sum;
  }
};

// All tokens of a job. Of an owner's memory that no pointer reaches nothing is stored: programs with such ranks have no
// wide iterations (distmk/lower/wide.py).
DISTMK_FN void store_job(const Context& context, const WideLinearArgs& args, const Job& job, FeatureRange features,
                         uint32_t num_tokens) {
  const OutputLane lane(args, features);
  const auto epilogue = static_cast<WideEpilogue>(args.epilogue);
  const uint32_t per_rank = rows_per_rank(num_tokens, context.num_ranks());
#pragma unroll 1
  for (uint32_t token = threadIdx.x / 32; token < job.num_tokens; token += NUM_WARPS) {
    const uint32_t row = job.first_token + token;
    if (epilogue == WideEpilogue::SWIGLU) {
      auto* out = context.at<__nv_bfloat16>(args.out);
      lane.store(token, [&](uint32_t f) { return out + activation_offset(row, f, args.out_stride, true); });
    } else if (epilogue == WideEpilogue::STORE) {
      auto* out = context.at<__nv_bfloat16>(args.out) + uint64_t{row} * args.out_stride;
      lane.store(token, [&](uint32_t f) { return out + f; });
    } else {
      float* out;
      if (epilogue == WideEpilogue::PARTS) {
        out = on_rank<float>(context, row / per_rank, args.out);
        if (!out) continue;
        out += uint64_t{row % per_rank} * args.out_stride + uint64_t{args.slot + job.split} * args.num_rows;
      } else {
        out = context.at<float>(args.out) + uint64_t{row} * args.out_stride;
      }
      lane.store(token, [&](uint32_t f) { return out + f; });
    }
  }
}

}  // namespace wide
}  // namespace distmk
