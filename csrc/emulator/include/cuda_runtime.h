// The part of CUDA C++ that the kernel uses, for the emulator.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "emulator/fibers.h"

#define __device__
#define __global__
#define __constant__ const
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __restrict__
#define shared_memory (distmk::emulator::current().block->shared)

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) int4 {
  int32_t x, y, z, w;
};

struct ThreadIndex {
  uint32_t x;
};
#define threadIdx (ThreadIndex{distmk::emulator::current().thread})
#define blockIdx (ThreadIndex{distmk::emulator::current().block->index})

inline uint32_t min(uint32_t a, uint32_t b) { return a < b ? a : b; }
inline uint32_t max(uint32_t a, uint32_t b) { return a > b ? a : b; }
inline float rsqrtf(float v) { return 1.0f / std::sqrt(v); }
inline float __expf(float v) { return std::exp(v); }
inline float __logf(float v) { return std::log(v); }
inline unsigned __float_as_uint(float v) { return __builtin_bit_cast(unsigned, v); }
inline float __fdividef(float a, float b) { return a / b; }
inline int __clz(int v) { return v ? __builtin_clz(static_cast<unsigned>(v)) : 32; }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline float __uint_as_float(uint32_t bits) {
  float v;
  memcpy(&v, &bits, 4);
  return v;
}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t pick) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) out |= static_cast<uint32_t>(bytes >> (pick >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return out;
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
inline unsigned long long atomicAdd(unsigned long long* p, unsigned long long v) {
  return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
}
inline uint32_t atomicAdd(uint32_t* p, uint32_t v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
inline uint32_t atomicOr(uint32_t* p, uint32_t v) { return __atomic_fetch_or(p, v, __ATOMIC_RELAXED); }
inline uint32_t atomicExch(uint32_t* p, uint32_t v) { return __atomic_exchange_n(p, v, __ATOMIC_RELAXED); }

inline void __syncthreads() {
  auto* block = distmk::emulator::current().block;
  distmk::emulator::meet(block->all, static_cast<uint32_t>(block->warps.size() * 32), "__syncthreads");
}
inline void __syncwarp() { distmk::emulator::meet_warp("__syncwarp"); }
inline void __nanosleep(unsigned) { distmk::emulator::yield(); }

namespace distmk {
namespace emulator {

// Operands of a lane: word 0 is its value, word 1 the source lane, word 2 the result.
inline void shuffle_all() {
  for (uint32_t lane = 0; lane < WARP; ++lane) {
    uint64_t* mine = operands_of(lane);
    mine[2] = operands_of(static_cast<uint32_t>(mine[1] % WARP))[0];
  }
}
inline void add_all() {
  uint64_t sum = 0;
  for (uint32_t lane = 0; lane < WARP; ++lane) sum += operands_of(lane)[0];
  for (uint32_t lane = 0; lane < WARP; ++lane) operands_of(lane)[2] = sum;
}
inline void all_of_all() {
  bool all = true;
  for (uint32_t lane = 0; lane < WARP; ++lane) all = all && operands_of(lane)[0];
  for (uint32_t lane = 0; lane < WARP; ++lane) operands_of(lane)[2] = all;
}

}  // namespace emulator
}  // namespace distmk

template <class T>
T __shfl_sync(unsigned, T value, uint32_t lane, uint32_t width = 32) {
  lane = distmk::emulator::current().thread % 32 / width * width + lane % width;
  using namespace distmk::emulator;
  const Unwatched here;
  memcpy(operands(), &value, sizeof value);
  operands()[1] = lane;
  meet_warp("shuffle", shuffle_all);
  memcpy(&value, operands() + 2, sizeof value);
  return value;
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, uint32_t step) {
  return __shfl_sync(mask, value, distmk::emulator::current().thread % 32 ^ step);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, uint32_t step) {
  const uint32_t lane = distmk::emulator::current().thread % 32;
  return __shfl_sync(mask, value, lane < step ? lane : lane - step);
}
inline unsigned __reduce_add_sync(unsigned, unsigned value) {
  using namespace distmk::emulator;
  const Unwatched here;
  operands()[0] = value;
  meet_warp("reduction", add_all);
  return static_cast<unsigned>(operands()[2]);
}
inline unsigned __ballot_sync(unsigned mask, bool mine) {
  return __reduce_add_sync(mask, static_cast<unsigned>(mine) << distmk::emulator::current().thread % 32);
}
inline bool __all_sync(unsigned, bool mine) {
  using namespace distmk::emulator;
  const Unwatched here;
  operands()[0] = mine;
  meet_warp("vote", all_of_all);
  return operands()[2];
}
