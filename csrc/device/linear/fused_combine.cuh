// The split-KV combine, fused into the GEMV that consumes attention's output, for a batch-1 row with few splits. A
// combine task would add one more hop between tasks.
//   x[k] = sum_s w_s o_s[k] / sum_s w_s, with w_s = exp(lse_s - max lse), over up to COMBINE_WIDTH normalized partials.
// Partials: bf16 [head, split, FUSED_PARTIAL_HEADER + head_dim]. The header's first word is the f32 lse.
#pragma once
#include "device/attention/lse.cuh"
#include "device/linear/activations.cuh"
#include "runtime/splits.h"

namespace distmk {
namespace linear {

static_assert(MAX_FUSED_COMBINE_COLS <= MAX_GEMV_BLOCKS * K_BLOCK, "the combined row must fit in shared memory");

// Combines the columns that one warp multiplies, eight elements of one head per lane. Each group of COMBINE_WIDTH lanes
// shares a head; its lane s has the log-sum-exp of split s.
template <class Args>
class FusedCombine {
 public:
  // `first`: the warp's first column of each block. If `polls`, the first headers are loaded at once.
  DISTMK_FN FusedCombine(const Context& context, const Args& args, bool polls, uint32_t first)
      : context_(context), args_(args), polls_(polls), first_(first) {
    if (!args.fused_partials) return;
    const BatchRun& run = context.batch(args.batch)->runs[0];
    if (!fuses_combine(args, 1, run)) return;
    num_splits_ = Splits::of_fused(args, run);
    if (polls) lse_ = poll_load(header_at(column_of(first)));
  }

  // Whether the row is combined here. Otherwise a combine task has left it in memory.
  DISTMK_FN bool is_there() const { return num_splits_; }

  // Combines this warp's columns of all blocks into shared memory.
  DISTMK_FN void combine_to_shared(__nv_bfloat16* smem) {
#pragma unroll 1
    for (uint32_t first = first_; first < args_.k; first += K_BLOCK) {
      const uint4 combined = combine(column_of(first));
      *reinterpret_cast<uint4*>(smem + first + own_thread() % 32 * CHUNK_K) = combined;
    }
  }

 private:
  const Context& context_;
  const Args& args_;
  bool polls_;
  uint32_t first_, num_splits_ = 0;
  float lse_ = 0;

  DISTMK_FN uint32_t column_of(uint32_t first) const {
    return min(first + own_thread() % 32 * CHUNK_K, args_.k - CHUNK_K);
  }
  DISTMK_FN const __nv_bfloat16* partial_at(uint32_t column, uint32_t split) const {
    const uint32_t head = column >> floor_log2(args_.head_dim);  // head_dim is a power of two
    return context_.at<__nv_bfloat16>(args_.fused_partials) +
           fused_partial_begin(head, split, args_.max_kv_splits, args_.head_dim);
  }
  DISTMK_FN const float* header_at(uint32_t column) const {
    return reinterpret_cast<const float*>(partial_at(column, min(own_thread() % COMBINE_WIDTH, num_splits_ - 1)));
  }

  // Polls the headers, which are written last, then loads headers and elements together until all are published.
  DISTMK_FN uint4 combine(uint32_t column) {
    const uint32_t element = column & (args_.head_dim - 1);
    const float* header = header_at(column);
    const __nv_bfloat16* elements = partial_at(column, 0) + FUSED_PARTIAL_HEADER + element;
    uint4 values[COMBINE_WIDTH];
    for (;;) {
      while (!__all_sync(~0u, is_published(lse_))) {
        const bool last = !polls_ || context_.stop_polling();
        lse_ = poll_load(header);
        if (__all_sync(~0u, last)) break;
      }
      const bool last = !polls_ || context_.stop_polling();
      lse_ = poll_load(header);
#pragma unroll
      for (uint32_t i = 0; i < COMBINE_WIDTH; ++i)
        values[i] = load_if(i < num_splits_,
                            reinterpret_cast<const uint4*>(elements + i * (FUSED_PARTIAL_HEADER + args_.head_dim)));
      bool all = is_published(lse_);
#pragma unroll
      for (uint32_t i = 0; i < COMBINE_WIDTH; ++i) all &= i >= num_splits_ || words_published(values[i]);
      if (__all_sync(~0u, all || last)) break;
    }
    const uint4 combined = weighted_sum(values, own_thread() % COMBINE_WIDTH < num_splits_ ? lse_ : -INFINITY);
    lse_ = 1.0f;  // the next block's partials are most likely there, so their headers are not polled alone
    return combined;
  }

  // `lse`: log-sum-exp of this lane's split, -inf if there is none.
  DISTMK_FN static uint4 weighted_sum(const uint4 (&values)[COMBINE_WIDTH], float lse) {
    float acc[8] = {}, sum = 0;
    const float weight = attention::lane_weight<COMBINE_WIDTH>(lse);
#pragma unroll
    for (uint32_t i = 0; i < COMBINE_WIDTH; ++i) {
      const float w = __shfl_sync(~0u, weight, i, COMBINE_WIDTH);
      const uint32_t words[4] = {values[i].x, values[i].y, values[i].z, values[i].w};
      sum += w;
#pragma unroll
      for (uint32_t e = 0; e < 4; ++e) {
        acc[2 * e] += low_of_pair(words[e]) * w;
        acc[2 * e + 1] += high_of_pair(words[e]) * w;
      }
    }
    const float scale = normalizer(sum);
    const auto pair = [&](uint32_t e) { return pack_bf16(acc[2 * e] * scale, acc[2 * e + 1] * scale); };
    return {pair(0), pair(1), pair(2), pair(3)};
  }
};

}  // namespace linear
}  // namespace distmk
