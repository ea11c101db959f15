// A linear task's activations: from memory straight into the registers that a tensor core takes them from. A warp loads
// what it multiplies, and waits for no other.
#pragma once
#include "device/comm/lamport.cuh"
#include "device/core/bf16.cuh"
#include "device/core/shared.cuh"
#include "runtime/context.h"

namespace distmk {
namespace linear {

constexpr uint32_t CHUNK_K = 8;           // activations of 16 bytes
constexpr uint32_t LOAD_K = 4 * CHUNK_K;  // of a row in one load: a chunk each of four lanes

struct Activations {
  const __nv_bfloat16* x;
  uint32_t k, stride, num_rows;
  uint32_t last_chunk;  // of a row, that can be read
};

DISTMK_FN Activations activations_of(Context& context, const LinearArgs& args, uint32_t num_rows) {
  return {context.at<__nv_bfloat16>(args.x), args.k, args.x_stride, num_rows, args.k - CHUNK_K};
}

DISTMK_FN uint32_t num_rows(const RankState& state, const LinearArgs& args) {
  return args.batch ? state.batch(args.batch)->num_rows : 1;
}

// Whether whole chunks can be read.
DISTMK_FN bool is_aligned(const RankState& state, const LinearArgs& args, uint32_t num_rows) {
  return (state.address(args.x) % 16 | args.k % CHUNK_K | (num_rows > 1 ? args.x_stride % CHUNK_K : 0)) == 0;
}

// Context::look() by a warp together. As long as none of it is there the warp looks at a `first` chunk alone: if all of
// it were asked for all the time, those who still work on it would be slower.
template <class Load>
DISTMK_FN void poll_by_warp(const Context& context, bool polls, const __nv_bfloat16* first, const Load& load) {
  for (;;) {
    const bool last = !polls || context.stop_polling(), here = load() || last;
    if (__all_sync(~0u, here)) return;
    if (!__all_sync(~0u, !here)) continue;
    while (!any_published(poll_load(reinterpret_cast<const uint4*>(first))) && !context.stop_polling()) {
    }
  }
}

constexpr uint32_t MAX_GEMV_BLOCKS = WORK_BYTES / (K_BLOCK * sizeof(__nv_bfloat16));

// Whether a task's activations fit into shared memory, where the head has its candidates.
DISTMK_FN bool fits_gemv(const LinearArgs& args, uint32_t num_rows) {
  return num_rows == 1 && args.k_pitch <= MAX_GEMV_BLOCKS * K_BLOCK &&
         args.epilogue != static_cast<uint32_t>(Epilogue::ARGMAX);
}

// Whether the loader holds while a task's events are signalled: where those behind it wait for them, and not for the
// elements that it writes, as they arrive. Behind queries, keys and values, too, which measured faster.
DISTMK_FN bool throttles_loader(const RankState& state, const LinearArgs& args) {
  switch (static_cast<Epilogue>(args.epilogue)) {
    case Epilogue::PUSH:
      return state.transport != nullptr;
    case Epilogue::ADD:
    case Epilogue::SWIGLU:
      return !args.reset;
    default:
      return true;
  }
}

DISTMK_FN __nv_bfloat16* gemv_input() { return reinterpret_cast<__nv_bfloat16*>(shared().work); }

// Brings there what this warp multiplies of them, from its column `first` of each block on: a trip to memory for all
// blocks together, where each would cost one of its own.
DISTMK_FN void stage_gemv_input(const Context& context, const Activations& a, bool polls, uint32_t first) {
  static_assert(K_TILE == 32 * CHUNK_K, "a chunk a lane");
  __nv_bfloat16* near = gemv_input();
  const uint32_t mine = first + threadIdx.x % 32 * CHUNK_K;
  uint4 chunks[MAX_GEMV_BLOCKS];
  poll_by_warp(context, polls, a.x + min(first, a.last_chunk), [&] {
    bool all = true;
#pragma unroll
    for (uint32_t i = 0; i < MAX_GEMV_BLOCKS; ++i)
      chunks[i] = poll_load(reinterpret_cast<const uint4*>(a.x + min(i * K_BLOCK + mine, a.last_chunk)));
#pragma unroll
    for (uint32_t i = 0; i < MAX_GEMV_BLOCKS; ++i) all &= all_published(chunks[i]);
    return all;
  });
#pragma unroll
  for (uint32_t i = 0; i < MAX_GEMV_BLOCKS; ++i) *reinterpret_cast<uint4*>(near + i * K_BLOCK + mine) = chunks[i];
}

// Of what is seldom met there is little code.
static __device__ __noinline__ uint4 load_unaligned_chunk(const __nv_bfloat16* x, uint32_t k, uint32_t end) {
  const auto* bits = reinterpret_cast<const unsigned short*>(x);
  const auto at = [&](uint32_t i) -> uint32_t { return k + i < end ? __ldcg(bits + k + i) : 0; };
  return {at(0) | at(1) << 16, at(2) | at(3) << 16, at(4) | at(5) << 16, at(6) | at(7) << 16};
}

// The activations that a column of weight tiles is multiplied with, of N_TILES tiles of token rows: lane 4 g + t has of
// row g columns 8 t to 8 t + 7 of each LOAD_K, which is what the order of columns in a tile (distmk/weights/packing.py)
// gives it of two products. Behind the last row there is some row again: what belongs to no token only spoils its own
// sums.
template <uint32_t N_TILES>
struct Column {
  uint4 chunks[N_TILES][K_TILE / LOAD_K];

  // Columns from `first` on, behind the last one any. No load has a condition: the compiler would wait for it before
  // the next.
  template <bool ALIGNED>
  DISTMK_FN void load(const Activations& a, uint32_t first) {
    const uint32_t lane = threadIdx.x % 32, k = first + lane % 4 * CHUNK_K;
#pragma unroll
    for (uint32_t tile = 0; tile < N_TILES; ++tile) {
      const uint32_t row = tile * N_TILE + lane / 4;
      const __nv_bfloat16* x = a.x + uint64_t{row < a.num_rows ? row : 0} * a.stride;
#pragma unroll
      for (uint32_t i = 0; i < K_TILE / LOAD_K; ++i) {
        const uint32_t at = k + i * LOAD_K;
        if constexpr (ALIGNED)
          chunks[tile][i] = *reinterpret_cast<const uint4*>(x + min(at, a.last_chunk));
        else
          chunks[tile][i] = load_unaligned_chunk(x, at, a.k);
      }
    }
  }

  // The same of a single row in shared memory, where whole blocks can be read, with zeros behind its `k` columns.
  DISTMK_FN void load_from_shared(uint32_t k, uint32_t first) {
    const __nv_bfloat16* x = gemv_input() + first + threadIdx.x % 4 * CHUNK_K;
#pragma unroll
    for (uint32_t i = 0; i < K_TILE / LOAD_K; ++i) chunks[0][i] = *reinterpret_cast<const uint4*>(x + i * LOAD_K);
    clear_behind(k, first);
  }

  // The same, where they are `arriving`, in whole chunks, as soon as they are there.
  template <bool ALIGNED>
  DISTMK_FN void load_there(Context& context, bool polls, const Activations& a, uint32_t first) {
    if (!ALIGNED || !polls) return load<ALIGNED>(a, first);
    const uint32_t k = first + threadIdx.x % 4 * CHUNK_K;
    poll_by_warp(context, true, a.x + min(first, a.last_chunk), [&] {
      bool all = true;
#pragma unroll
      for (uint32_t tile = 0; tile < N_TILES; ++tile) {
        const uint32_t row = tile * N_TILE + threadIdx.x % 32 / 4;
        const __nv_bfloat16* x = a.x + uint64_t{row < a.num_rows ? row : 0} * a.stride;
#pragma unroll
        for (uint32_t i = 0; i < K_TILE / LOAD_K; ++i)
          chunks[tile][i] = poll_load(reinterpret_cast<const uint4*>(x + min(k + i * LOAD_K, a.last_chunk)));
      }
#pragma unroll
      for (const auto& row : chunks)
#pragma unroll
        for (const uint4& chunk : row) all &= all_published(chunk);
      return all;
    });
    context.inputs_polled();
  }

  // What was loaded from `first` on, with zeros behind the last column.
  DISTMK_FN void clear_behind(uint32_t k, uint32_t first) {
    if (first + K_TILE <= k) return;
#pragma unroll
    for (auto& row : chunks)
#pragma unroll
      for (uint32_t i = 0; i < K_TILE / LOAD_K; ++i)
        if (first + threadIdx.x % 4 * CHUNK_K + i * LOAD_K >= k) row[i] = eight_zeros();
  }
};

}  // namespace linear
}  // namespace distmk
