// Activations of linear layers with packed weights. The weight of a preceding norm multiplies them, since packed
// weights are not multiplied by it. Then they are multiplied by powers of two, and ordered, as the format of the
// weights asks for (packed_tile.cuh).
//
// Column k of X is column `lead` + k of W, because a row is stored in whole groups. In columns of W that X does not
// have, activations are zero. Columns of X are counted in unsigned numbers, which wrap around before the first one.
#pragma once
#ifdef DISTMK_PACKED
#include "device/formats/format_traits.cuh"
#include "device/linear/activations.cuh"

namespace distmk {
namespace linear {

// warp_k_begin(), opaque as own_warp() is.
DISTMK_FN uint32_t own_k_begin() { return own_warp() * K_TILE; }
// The first column of this lane's chunk in every LOAD_K columns.
DISTMK_FN uint32_t lane_column() { return opaque(threadIdx.x) % 4 * CHUNK_K; }

DISTMK_FN uint32_t multiply_rounded(uint32_t pair, float low, float high) {
  return pack_bf16(low_of_pair(pair) * low, high_of_pair(pair) * high);
}

// The factors of the CHUNK_K columns of a chunk.
struct ChunkFactors {
  float of[CHUNK_K];

  DISTMK_FN void load(const float* from) {
    const float4 first = reinterpret_cast<const float4*>(from)[0], second = reinterpret_cast<const float4*>(from)[1];
    of[0] = first.x, of[1] = first.y, of[2] = first.z, of[3] = first.w;
    of[4] = second.x, of[5] = second.y, of[6] = second.z, of[7] = second.w;
  }
  // Columns outside of X have the factor 0.
  DISTMK_FN void load_unaligned(const float* norm, uint32_t column, uint32_t k) {
#pragma unroll
    for (uint32_t j = 0; j < CHUNK_K; ++j) of[j] = column + j < k ? norm[column + j] : 0.0f;
  }
  DISTMK_FN uint4 times(const uint4& x) const {
    return {multiply_rounded(x.x, of[0], of[1]), multiply_rounded(x.y, of[2], of[3]),
            multiply_rounded(x.z, of[4], of[5]), multiply_rounded(x.w, of[6], of[7])};
  }
};

// A chunk times powers of two: the pairs that b0 of an mma takes by `even`, those of b1 by `odd`.
DISTMK_FN uint4 scaled_pairs(const uint4& x, uint32_t even, uint32_t odd) {
  return {multiply_pairs(x.x, even), multiply_pairs(x.y, odd), multiply_pairs(x.z, even), multiply_pairs(x.w, odd)};
}

// Orders chunks of four lanes so that an mma multiplies 16 consecutive columns. A chunk of lane t is columns 8 t to
// 8 t + 7 of 32; lanes t and t + 2 exchange halves of theirs. Then lane t has columns 4 p to 4 p + 3 and 16 + 4 p to
// 16 + 4 p + 3, with p = 0, 2, 1, 3.
DISTMK_FN uint4 in_halves(const uint4& x) {
  const bool upper = opaque(threadIdx.x) % 4 < 2;
  const uint32_t first = __shfl_xor_sync(~0u, upper ? x.z : x.x, 2),
                 second = __shfl_xor_sync(~0u, upper ? x.w : x.y, 2);
  return upper ? uint4{x.x, x.y, first, second} : uint4{first, second, x.z, x.w};
}

DISTMK_FN float square_of(const uint4& x) {
  float sum = 0.0f;
#pragma unroll
  for (const uint32_t pair : {x.x, x.y, x.z, x.w}) {
    sum += low_of_pair(pair) * low_of_pair(pair);
    sum += high_of_pair(pair) * high_of_pair(pair);
  }
  return sum;
}

// Calls visit(chunk) for every chunk of a K tile.
template <uint32_t N_TILES, class Visit>
DISTMK_FN void for_chunks(FragmentB<N_TILES>& x, const Visit& visit) {
#pragma unroll
  for (auto& token : x.chunks)
#pragma unroll
    for (uint4& chunk : token) visit(chunk);
}

// Zeroes the columns of a tile outside of X. It was loaded from column `k_begin` of X on, in whole chunks.
template <uint32_t N_TILES>
DISTMK_FN void zero_outside(FragmentB<N_TILES>& x, uint32_t k, uint32_t k_begin) {
  if (k_begin < k && k_begin + K_TILE <= k) return;
  const uint32_t first = k_begin + lane_column();
#pragma unroll
  for (auto& token : x.chunks)
#pragma unroll
    for (uint32_t i = 0; i < K_TILE / LOAD_K; ++i)
      if (first + i * LOAD_K >= k) token[i] = zero_chunk();
}

// The norm's factors of this warp's columns, by column of W. Of aligned activations they are copied to shared memory
// before the inputs are there, if they have room, so that no K block waits for them.
template <bool ALIGNED>
class NormFactors {
 public:
  static constexpr uint32_t MAX_BLOCKS = overlay_bytes(Overlay::NORM_FACTORS) / (K_BLOCK * sizeof(float));

  DISTMK_FN NormFactors(const Context& context, const PackedLinearArgs& args) : context_(context), args_(args) {
    if (!is_shared()) return;
    const float* norm = context.at<float>(args.norm);
#pragma unroll 1
    for (uint32_t k = own_k_begin() + opaque(threadIdx.x) % 32 * CHUNK_K; k < args.k_pitch; k += K_BLOCK) {
      const auto* from = reinterpret_cast<const float4*>(norm + min(k - args.lead, args.k - CHUNK_K));
      auto* to = reinterpret_cast<float4*>(copy() + k);
      const float4 first = from[0], second = from[1];
      to[0] = first, to[1] = second;
    }
    __syncwarp();
  }
  // Multiplies activations that were loaded from column `k_begin` of X on, and rounds to bf16. Columns that X does not
  // have get any factors.
  template <uint32_t N_TILES>
  DISTMK_FN void multiply(FragmentB<N_TILES>& x, uint32_t k_begin) const {
    const float* norm = context_.at<float>(args_.norm);  // resolved here, as there are no registers to keep it in
    const float* copied = is_shared() ? copy() + static_cast<int32_t>(k_begin + args_.lead) : nullptr;
#pragma unroll
    for (uint32_t i = 0; i < K_TILE / LOAD_K; ++i) {
      const uint32_t in_tile = lane_column() + i * LOAD_K, column = k_begin + in_tile;
      ChunkFactors factors;
      if constexpr (ALIGNED)
        factors.load(copied ? copied + in_tile : norm + min(column, args_.k - CHUNK_K));
      else
        factors.load_unaligned(norm, column, args_.k);
#pragma unroll
      for (auto& token : x.chunks) token[i] = factors.times(token[i]);
    }
  }

 private:
  const Context& context_;
  const PackedLinearArgs& args_;

  DISTMK_FN static float* copy() { return shared().at<Overlay::NORM_FACTORS, float>(); }
  DISTMK_FN bool is_shared() const { return ALIGNED && args_.norm && args_.k_pitch <= MAX_BLOCKS * K_BLOCK; }
};

}  // namespace linear
}  // namespace distmk
#endif  // DISTMK_PACKED
