// The B operand of linear layers: loads activations X[n, k] (n: tokens, k: columns, bf16) from global memory into B
// fragments of mma.m16n8k16. Each warp loads the K tile that it multiplies, straight into registers, and waits for no
// other warp.
#pragma once
#include "device/comm/lamport.cuh"
#include "device/core/bf16.cuh"
#include "device/core/shared.cuh"
#include "runtime/context.h"

namespace distmk {
namespace linear {

constexpr uint32_t CHUNK_K = 8;           // columns of a 16-byte load
constexpr uint32_t LOAD_K = 4 * CHUNK_K;  // columns of a token that four lanes load together, one chunk each

// First column of this warp in every K block.
DISTMK_FN uint32_t warp_k_begin() { return own_thread() / 32 * K_TILE; }

struct Activations {
  const __nv_bfloat16* x;
  uint32_t k, stride, num_tokens;
  uint32_t last_chunk;  // column of a token's last whole chunk
};

template <class Args>
DISTMK_FN Activations activations_of(Context& context, const Args& args, uint32_t num_tokens) {
  return {context.at<__nv_bfloat16>(args.x), args.k, args.x_stride, num_tokens, args.k - CHUNK_K};
}

// Calls `load` until all 32 lanes report that their elements are published; once, if not `polls`. While no lane has its
// elements, the warp polls a single chunk at `probe`: polling all of them would slow down the SMs that write them.
template <class Load>
DISTMK_FN void poll_by_warp(const Context& context, bool polls, const __nv_bfloat16* probe, const Load& load) {
  for (;;) {
    const bool last = !polls || context.stop_polling(), complete = load() || last;
    if (__all_sync(~0u, complete)) return;
    if (!__all_sync(~0u, !complete)) continue;
    while (!any_published(poll_load(reinterpret_cast<const uint4*>(probe))) && !context.stop_polling()) {
    }
  }
}

constexpr uint32_t MAX_GEMV_BLOCKS = WORK_BYTES / (K_BLOCK * sizeof(__nv_bfloat16));
static_assert(MAX_GEMV_BLOCKS * K_BLOCK * sizeof(__nv_bfloat16) <= overlay_bytes(Overlay::GEMV_INPUT), "");

// GEMV path: the token's activations in shared memory, [blocks][K_BLOCK]. A warp writes and reads only its own K tile
// of each block.
DISTMK_FN __nv_bfloat16* gemv_input() { return shared().at<Overlay::GEMV_INPUT, __nv_bfloat16>(); }

// Copies this warp's K tiles of up to BLOCKS blocks to gemv_input(). `k_begin` is the warp's first column. All blocks
// take one round trip to L2; loading each block on its own would take one per block. `lead`: columns of the weights
// before the first one of X; what is copied for them is any column of X.
template <uint32_t BLOCKS = MAX_GEMV_BLOCKS>
DISTMK_FN void stage_gemv_input(const Context& context, const Activations& a, bool polls, uint32_t k_begin,
                                uint32_t lead = 0) {
  static_assert(K_TILE == 32 * CHUNK_K, "a chunk a lane");
  __nv_bfloat16* staged = gemv_input();
  const uint32_t lane_k = k_begin + own_thread() % 32 * CHUNK_K;
  uint4 chunks[BLOCKS];
  poll_by_warp(context, polls, a.x + min(k_begin - lead, a.last_chunk), [&] {
    bool complete = true;
#pragma unroll
    for (uint32_t i = 0; i < BLOCKS; ++i)
      chunks[i] = poll_load(reinterpret_cast<const uint4*>(a.x + min(i * K_BLOCK + lane_k - lead, a.last_chunk)));
#pragma unroll
    for (uint32_t i = 0; i < BLOCKS; ++i) complete &= all_published(chunks[i]);
    return complete;
  });
#pragma unroll
  for (uint32_t i = 0; i < BLOCKS; ++i) *reinterpret_cast<uint4*>(staged + i * K_BLOCK + lane_k) = chunks[i];
}

// Out of line, because it is rare and would otherwise be inlined for every chunk.
static __device__ __noinline__ uint4 load_unaligned_chunk(const __nv_bfloat16* x, uint32_t k, uint32_t end) {
  const auto* bits = reinterpret_cast<const unsigned short*>(x);
  const auto at = [&](uint32_t i) -> uint32_t { return k + i < end ? __ldcg(bits + (k + i)) : 0; };
  return {at(0) | at(1) << 16, at(2) | at(3) << 16, at(4) | at(5) << 16, at(6) | at(7) << 16};
}

// B fragments of one K tile: N_TILES tiles of 8 tokens by K_TILE columns. Lane 4 g + t holds columns 8 t to 8 t + 7 of
// every LOAD_K columns of token g. In the packed order of weight columns (distmk/formats/tiles.py), these are its B
// registers of two mma.k16.
template <uint32_t N_TILES>
struct FragmentB {
  uint4 chunks[N_TILES][K_TILE / LOAD_K];

  // Loads columns from `k_begin` on. Columns beyond the last hold anything until zero_beyond(). Loads are
  // unconditional, with clamped addresses, because the compiler would wait for a conditional load before it issues the
  // next.
  template <bool ALIGNED>
  DISTMK_FN void load(const Activations& a, uint32_t k_begin) {
    const uint32_t lane_k = k_begin + own_thread() % 4 * CHUNK_K;
#pragma unroll
    for (uint32_t n = 0; n < N_TILES; ++n) {
      const __nv_bfloat16* x = row_of_lane(a, n);
#pragma unroll
      for (uint32_t i = 0; i < K_TILE / LOAD_K; ++i) {
        const uint32_t k = lane_k + i * LOAD_K;
        if constexpr (ALIGNED)
          chunks[n][i] = *reinterpret_cast<const uint4*>(x + min(k, a.last_chunk));
        else
          chunks[n][i] = load_unaligned_chunk(x, k, a.k);
      }
    }
  }

  // load(), polling until all elements are published. Only whole chunks can be polled.
  template <bool ALIGNED>
  DISTMK_FN void load_published(Context& context, bool polls, const Activations& a, uint32_t k_begin) {
    if (!ALIGNED || !polls) return load<ALIGNED>(a, k_begin);
    const uint32_t lane_k = k_begin + own_thread() % 4 * CHUNK_K;
    poll_by_warp(context, true, a.x + min(k_begin, a.last_chunk), [&] {
      bool complete = true;
#pragma unroll
      for (uint32_t n = 0; n < N_TILES; ++n) {
        const __nv_bfloat16* x = row_of_lane(a, n);
#pragma unroll
        for (uint32_t i = 0; i < K_TILE / LOAD_K; ++i)
          chunks[n][i] = poll_load(reinterpret_cast<const uint4*>(x + min(lane_k + i * LOAD_K, a.last_chunk)));
      }
#pragma unroll
      for (const auto& token : chunks)
#pragma unroll
        for (const uint4& chunk : token) complete &= all_published(chunk);
      return complete;
    });
    context.inputs_polled();
  }

  // GEMV path: loads the token's columns from `k_begin` on from shared memory, with zeros beyond its `k` columns.
  DISTMK_FN void load_from_shared(uint32_t k, uint32_t k_begin) {
    const __nv_bfloat16* x = gemv_input() + k_begin + own_thread() % 4 * CHUNK_K;
#pragma unroll
    for (uint32_t i = 0; i < K_TILE / LOAD_K; ++i) chunks[0][i] = *reinterpret_cast<const uint4*>(x + i * LOAD_K);
    zero_beyond(k, k_begin);
  }

  // Zeroes the columns beyond `k` in a tile that was loaded from `k_begin` on.
  DISTMK_FN void zero_beyond(uint32_t k, uint32_t k_begin) {
    if (k_begin + K_TILE <= k) return;
#pragma unroll
    for (auto& token : chunks)
#pragma unroll
      for (uint32_t i = 0; i < K_TILE / LOAD_K; ++i)
        if (k_begin + own_thread() % 4 * CHUNK_K + i * LOAD_K >= k) token[i] = zero_chunk();
  }

 private:
  // The row of X that this lane loads for an N tile. Lanes beyond the last token load token 0, which affects no other
  // token's sums.
  DISTMK_FN static const __nv_bfloat16* row_of_lane(const Activations& a, uint32_t n) {
    const uint32_t token = n * N_TILE + own_thread() % 32 / 4;
    return a.x + uint64_t{token < a.num_tokens ? token : 0} * a.stride;
  }
};

}  // namespace linear
}  // namespace distmk
