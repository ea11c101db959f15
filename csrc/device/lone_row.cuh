// A single row of attention's output, merged by those who multiply it: as a task of its own that would be a hop more.
#pragma once
#include "device/activations.cuh"
#include "runtime/splits.h"

namespace distmk {
namespace linear {

static_assert(MAX_LONE_COLS <= NEAR_BLOCKS * BLOCK_K, "brought to shared memory as a whole");

// What this warp multiplies of attention's output, merged from its splits (AttentionArgs::lone): a lane takes eight
// elements of a head, and weighs one split for the eight lanes that it is among.
class LoneRow {
 public:
  // `looks`: the first headers are asked for at once.
  DISTMK_FN LoneRow(const Context& context, const LinearArgs& args, bool looks, uint32_t first)
      : context_(context), args_(args), looks_(looks), first_(first) {
    if (looks && args.lone) found_ = load_arriving(header_at(column_of(first), 0, num_splits()));
  }

  // Its parts of all blocks brought to shared memory.
  DISTMK_FN void bring(__nv_bfloat16* near) {
    const uint32_t count = num_splits();
#pragma unroll 1
    for (uint32_t first = first_; first < args_.k; first += BLOCK_K) {
      const uint4 merged = merge(column_of(first), count);
      *reinterpret_cast<uint4*>(near + first + threadIdx.x % 32 * CHUNK_K) = merged;
    }
  }

 private:
  const Context& context_;
  const LinearArgs& args_;
  bool looks_;
  uint32_t first_;
  float found_ = 0;

  DISTMK_FN uint32_t num_splits() const { return Splits::of_only(args_, context_.batch(args_.batch)->runs[0]); }
  DISTMK_FN uint32_t column_of(uint32_t first) const {
    return min(first + threadIdx.x % 32 * CHUNK_K, args_.k - CHUNK_K);
  }
  DISTMK_FN const __nv_bfloat16* split_at(uint32_t column, uint32_t split) const {
    const uint32_t head = column >> (31 - __clz(static_cast<int>(args_.head_dim)));  // which is 64 or 128
    return context_.at<__nv_bfloat16>(args_.lone) + lone_begin(head, split, args_.max_splits, args_.head_dim);
  }
  DISTMK_FN const float* header_at(uint32_t column, uint32_t first, uint32_t count) const {
    const uint32_t split = first + threadIdx.x % SPLITS_AT_ONCE;
    return reinterpret_cast<const float*>(split_at(column, min(split, count - 1)));
  }

  // Who looks looks at the headers, which are written last, and at the elements once those are there.
  DISTMK_FN uint4 merge(uint32_t column, uint32_t count) {
    float acc[8] = {}, maximum = -INFINITY, total = 0;
#pragma unroll 1
    for (uint32_t first = 0; first < count; first += SPLITS_AT_ONCE) {
      const uint32_t here = min(count - first, SPLITS_AT_ONCE), element = column & (args_.head_dim - 1);
      const float* header = header_at(column, first, count);
      const __nv_bfloat16* elements = split_at(column, first) + LONE_HEADER + element;
      uint4 values[SPLITS_AT_ONCE];
      for (;;) {
        while (!__all_sync(~0u, __float_as_uint(found_))) {
          const bool last = !looks_ || context_.stop_looking();
          found_ = load_arriving(header);
          if (__all_sync(~0u, last)) break;
        }
        const bool last = !looks_ || context_.stop_looking();
        found_ = load_arriving(header);
#pragma unroll
        for (uint32_t i = 0; i < SPLITS_AT_ONCE; ++i)
          values[i] = load_if(i < here, reinterpret_cast<const uint4*>(elements + i * (LONE_HEADER + args_.head_dim)));
        bool all = __float_as_uint(found_) != 0;
#pragma unroll
        for (uint32_t i = 0; i < SPLITS_AT_ONCE; ++i) all &= i >= here || words_have_arrived(values[i]);
        if (__all_sync(~0u, all || last)) break;
      }
      add(values, threadIdx.x % SPLITS_AT_ONCE < here ? found_ : -INFINITY, acc, maximum, total);
      found_ = 1.0f;  // what comes next is most likely there
    }
    const float scale = __fdividef(1.0f, total);
    const auto pair = [&](uint32_t e) { return pack_bf16(acc[2 * e] * scale, acc[2 * e + 1] * scale); };
    return {pair(0), pair(1), pair(2), pair(3)};
  }

  // Splits of which this lane's has the weight e^`mine`.
  DISTMK_FN static void add(const uint4 (&values)[SPLITS_AT_ONCE], float mine, float (&acc)[8], float& maximum,
                            float& total) {
    float higher = mine;
    for (uint32_t step = 1; step < SPLITS_AT_ONCE; step <<= 1)
      higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, step));
    higher = fmaxf(higher, maximum);
    const float keep = __expf(maximum - higher), weight = __expf(mine - higher);
    maximum = higher;
    total *= keep;
#pragma unroll
    for (float& sum : acc) sum *= keep;
#pragma unroll
    for (uint32_t i = 0; i < SPLITS_AT_ONCE; ++i) {
      const float share = __shfl_sync(~0u, weight, i, SPLITS_AT_ONCE);
      const uint32_t words[4] = {values[i].x, values[i].y, values[i].z, values[i].w};
      total += share;
#pragma unroll
      for (uint32_t e = 0; e < 4; ++e) {
        acc[2 * e] += __uint_as_float(words[e] << 16) * share;
        acc[2 * e + 1] += __uint_as_float(words[e] & 0xffff0000u) * share;
      }
    }
  }
};

}  // namespace linear
}  // namespace distmk
