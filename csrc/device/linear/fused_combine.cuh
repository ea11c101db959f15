// A single row of attention's output, merged by those who multiply it: as a task of its own that would be a hop more.
#pragma once
#include "device/linear/activations.cuh"
#include "runtime/splits.h"

namespace distmk {
namespace linear {

static_assert(MAX_FUSED_COMBINE_COLS <= MAX_GEMV_BLOCKS * K_BLOCK, "brought to shared memory as a whole");

// What this warp multiplies of attention's output, merged from its splits (AttentionArgs::lone): a lane takes eight
// elements of a head, and weighs one split for the eight lanes that it is among.
class LoneRow {
 public:
  // Of a single row. `looks`: the first headers are asked for at once.
  DISTMK_FN LoneRow(const Context& context, const LinearArgs& args, bool looks, uint32_t first)
      : context_(context), args_(args), looks_(looks), first_(first) {
    if (!args.fused_partials) return;
    const BatchRun& run = context.batch(args.batch)->runs[0];
    if (!fuses_combine(args, 1, run)) return;
    count_ = Splits::of_fused(args, run);
    if (looks) found_ = poll_load(header_at(column_of(first)));
  }

  DISTMK_FN bool is_there() const { return count_; }

  // Its parts of all blocks brought to shared memory.
  DISTMK_FN void bring(__nv_bfloat16* near) {
#pragma unroll 1
    for (uint32_t first = first_; first < args_.k; first += K_BLOCK) {
      const uint4 combined = combine(column_of(first));
      *reinterpret_cast<uint4*>(near + first + threadIdx.x % 32 * CHUNK_K) = combined;
    }
  }

 private:
  const Context& context_;
  const LinearArgs& args_;
  bool looks_;
  uint32_t first_, count_ = 0;  // splits
  float found_ = 0;

  DISTMK_FN uint32_t column_of(uint32_t first) const {
    return min(first + threadIdx.x % 32 * CHUNK_K, args_.k - CHUNK_K);
  }
  DISTMK_FN const __nv_bfloat16* split_at(uint32_t column, uint32_t split) const {
    const uint32_t head = column >> (31 - __clz(static_cast<int>(args_.head_dim)));  // which is 64 or 128
    return context_.at<__nv_bfloat16>(args_.fused_partials) +
           fused_partial_begin(head, split, args_.max_splits, args_.head_dim);
  }
  DISTMK_FN const float* header_at(uint32_t column) const {
    return reinterpret_cast<const float*>(split_at(column, min(threadIdx.x % COMBINE_WIDTH, count_ - 1)));
  }

  // Who looks looks at the headers, which are written last, and at the elements once those are there.
  DISTMK_FN uint4 combine(uint32_t column) {
    const uint32_t element = column & (args_.head_dim - 1);
    const float* header = header_at(column);
    const __nv_bfloat16* elements = split_at(column, 0) + FUSED_PARTIAL_HEADER + element;
    uint4 values[COMBINE_WIDTH];
    for (;;) {
      while (!__all_sync(~0u, __float_as_uint(found_))) {
        const bool last = !looks_ || context_.stop_polling();
        found_ = poll_load(header);
        if (__all_sync(~0u, last)) break;
      }
      const bool last = !looks_ || context_.stop_polling();
      found_ = poll_load(header);
#pragma unroll
      for (uint32_t i = 0; i < COMBINE_WIDTH; ++i)
        values[i] =
            load_if(i < count_, reinterpret_cast<const uint4*>(elements + i * (FUSED_PARTIAL_HEADER + args_.head_dim)));
      bool all = __float_as_uint(found_) != 0;
#pragma unroll
      for (uint32_t i = 0; i < COMBINE_WIDTH; ++i) all &= i >= count_ || words_published(values[i]);
      if (__all_sync(~0u, all || last)) break;
    }
    const uint4 combined = add_up(values, threadIdx.x % COMBINE_WIDTH < count_ ? found_ : -INFINITY);
    found_ = 1.0f;  // what comes next is most likely there
    return combined;
  }

  // Splits of which this lane's has the weight e^`mine`.
  DISTMK_FN static uint4 add_up(const uint4 (&values)[COMBINE_WIDTH], float mine) {
    float maximum = mine, acc[8] = {}, total = 0;
    for (uint32_t step = 1; step < COMBINE_WIDTH; step <<= 1)
      maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, step));
    const float weight = __expf(mine - maximum);
#pragma unroll
    for (uint32_t i = 0; i < COMBINE_WIDTH; ++i) {
      const float share = __shfl_sync(~0u, weight, i, COMBINE_WIDTH);
      const uint32_t words[4] = {values[i].x, values[i].y, values[i].z, values[i].w};
      total += share;
#pragma unroll
      for (uint32_t e = 0; e < 4; ++e) {
        acc[2 * e] += __uint_as_float(words[e] << 16) * share;
        acc[2 * e + 1] += __uint_as_float(words[e] & 0xffff0000u) * share;
      }
    }
    const float scale = __fdividef(1.0f, total);
    const auto pair = [&](uint32_t e) { return pack_bf16(acc[2 * e] * scale, acc[2 * e + 1] * scale); };
    return {pair(0), pair(1), pair(2), pair(3)};
  }
};

}  // namespace linear
}  // namespace distmk
