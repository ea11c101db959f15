// The thread block that runtime/sample_row.h asks for, made of a worker's consumer warps: reductions, a sort, and the
// memory that the warps share.
#pragma once
#include "device/core/shared.cuh"
#include "runtime/token_selector.h"

namespace distmk {

struct SamplingMemory {
  SelectorMemory selector;
  SlotSampling slot;
  uint64_t of_warp[NUM_WARPS];
};
static_assert(NUM_CONSUMERS <= MAX_THREADS, "");

struct DeviceBlock {
  using Vector = float4;
  static constexpr uint32_t LANES = 32, NUM_WARPS = distmk::NUM_WARPS, LOADS_IN_FLIGHT = 8;
  static constexpr uint32_t RACERS_IN_FLIGHT = 4;  // vectors in flight in a token race, which take more registers
  static_assert(sizeof(SlotSampling) % sizeof(uint64_t) == 0, "");

  DISTMK_FN static uint32_t index() { return threadIdx.x; }
  DISTMK_FN static uint32_t size() { return NUM_CONSUMERS; }
  DISTMK_FN static uint32_t lane() { return threadIdx.x % LANES; }
  DISTMK_FN static uint32_t warp() { return threadIdx.x / LANES; }
  DISTMK_FN static void sync() { barrier_sync<NUM_CONSUMERS>(); }
  DISTMK_FN static SamplingMemory& all_memory() { return *shared().at<Overlay::SAMPLER, SamplingMemory>(); }
  DISTMK_FN static SelectorMemory& memory() { return all_memory().selector; }
  // Copies a slot's parameters to shared memory.
  DISTMK_FN static const SlotSampling& slot(const SlotSampling* from) {
    auto* words = reinterpret_cast<uint64_t*>(&all_memory().slot);
    constexpr uint32_t NUM_WORDS = sizeof(SlotSampling) / sizeof(uint64_t);
    sync();
    if (index() < NUM_WORDS) words[index()] = __ldcg(reinterpret_cast<const unsigned long long*>(from) + index());
    sync();
    return all_memory().slot;
  }

  // Loads past L1, because logits, tables and parameters are written during the kernel.
  template <class T>
  DISTMK_FN static T load(const T* p) {
    return __ldcg(p);
  }
  DISTMK_FN static uint32_t add(uint32_t* p, uint32_t v) { return atomicAdd(p, v); }
  DISTMK_FN static void set_bits(uint32_t* p, uint32_t bits) { atomicOr(p, bits); }

  DISTMK_FN static float exp(float x) { return __expf(x); }
  DISTMK_FN static float log(float x) { return __logf(x); }

  // Combines the values of all threads, always in the same order. Every thread gets the result.
  template <class T, class F>
  DISTMK_FN static T reduce(T mine, const F& combine) {
    static_assert(sizeof(T) <= sizeof(uint64_t), "");
    for (uint32_t step = 16; step; step >>= 1) mine = combine(mine, from_lane(mine, step));
    auto* of_warp = all_memory().of_warp;
    sync();
    if (index() % 32 == 0) *reinterpret_cast<T*>(&of_warp[index() / 32]) = mine;
    sync();
    T all = *reinterpret_cast<T*>(&of_warp[0]);
    DISTMK_NO_UNROLL
    for (uint32_t warp = 1; warp < NUM_WARPS; ++warp) all = combine(all, *reinterpret_cast<T*>(&of_warp[warp]));
    return all;
  }
  // The sum of the values of all threads before this one.
  DISTMK_FN static uint64_t sum_before(uint64_t mine) {
    const uint32_t lane = index() % 32;
    uint64_t through = mine;
    for (uint32_t step = 1; step < 32; step <<= 1) {
      const uint64_t before = __shfl_up_sync(~0u, through, step);
      if (lane >= step) through += before;
    }
    auto* of_warp = all_memory().of_warp;
    sync();
    if (lane == 31) of_warp[index() / 32] = through;
    sync();
    uint64_t sum = through - mine;
    DISTMK_NO_UNROLL
    for (uint32_t warp = 0; warp < index() / 32; ++warp) sum += of_warp[warp];
    return sum;
  }
  // Sorts in ascending order by a bitonic network. The list must have room for the next power of two.
  DISTMK_FN static void sort(TokenKey* list, uint32_t count) {
    uint32_t size = 2;
    while (size < count) size *= 2;
    for (uint32_t i = count + index(); i < size; i += NUM_CONSUMERS) list[i] = ~TokenKey{0};
    DISTMK_NO_UNROLL
    for (uint32_t run = 2; run <= size; run *= 2) {
      DISTMK_NO_UNROLL
      for (uint32_t step = run / 2; step; step /= 2) {
        sync();
        DISTMK_NO_UNROLL
        for (uint32_t pair = index(); pair < size / 2; pair += NUM_CONSUMERS) {
          const uint32_t low = pair / step * 2 * step + pair % step, high = low + step;
          const TokenKey a = list[low], b = list[high];
          const bool ascending = !(low & run);
          if (ascending ? a > b : a < b) list[low] = b, list[high] = a;
        }
      }
    }
    sync();
  }

 private:
  // The value of the lane whose number differs in the bit `step`.
  DISTMK_FN static Candidate from_lane(const Candidate& mine, uint32_t step) {
    return {__shfl_xor_sync(~0u, mine.value, step), __shfl_xor_sync(~0u, mine.token, step)};
  }
  template <class T>
  DISTMK_FN static T from_lane(T mine, uint32_t step) {
    return __shfl_xor_sync(~0u, mine, step);
  }
};

}  // namespace distmk
