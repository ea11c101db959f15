// A linear task's activations in shared memory, as a tensor core takes them.
#pragma once
#include "device/matrix.cuh"
#include "device/shared.cuh"
#include "runtime/context.h"

namespace distmk {
namespace linear {

constexpr uint32_t X_PAD = 8;  // bf16 elements between columns, so that a fragment's columns lie in different banks

// The task's activations, rounded to bf16, a token row a column of the product. All of K where it fits, else the block
// of K that is being multiplied; of up to TILE_TOKENS rows two such blocks in turn, so that one can be written while
// some warps still read the other.
struct Activations {
  const float* x;
  const float* norm;
  uint32_t k, k_pitch, x_stride, num_rows;
  bool resident;

  DISTMK_FN uint32_t column_stride() const { return (resident ? k_pitch : BLOCK_K) + X_PAD; }
  // Where the first columns of the block from `k0` on lie, which is the `n`-th that is staged.
  DISTMK_FN uint32_t place_of(uint32_t k0, uint32_t n) const {
    return resident ? k0 : num_rows > TILE_TOKENS ? 0 : n % 2 * TILE_TOKENS * column_stride();
  }
  // Whether a block is written over the one that was multiplied last.
  DISTMK_FN bool overwrites() const { return !resident && num_rows > TILE_TOKENS; }
};
static_assert(2 * TILE_TOKENS >= MAX_ROWS, "two tiles hold all rows");
static_assert(VECTOR_BYTES >= 2 * TILE_TOKENS * (BLOCK_K + X_PAD) * sizeof(__nv_bfloat16),
              "two blocks of a tile of rows");

DISTMK_FN Activations activations_of(Context& context, const LinearArgs& args, uint32_t num_rows) {
  const uint32_t whole_bytes = num_rows * (args.k_pitch + X_PAD) * sizeof(__nv_bfloat16);
  return {context.at<float>(args.x),  context.at<float>(args.norm), args.k, args.k_pitch, args.x_stride, num_rows,
          whole_bytes <= VECTOR_BYTES};
}

// Whether activations and norm can be read 16 bytes at a time, to their end.
DISTMK_FN bool is_aligned(uint64_t x, uint64_t norm, uint32_t k) { return ((x | norm) % 16 | k % 4) == 0; }

// Four of them from `k` on, zeros behind the end. Of what is seldom met there is little code.
static __device__ __noinline__ float4 load_unaligned_four(const float* x, uint32_t k, uint32_t end) {
  const auto at = [&](uint32_t i) { return i < end ? __ldcg(x + i) : 0.0f; };
  return {at(k), at(k + 1), at(k + 2), at(k + 3)};
}

// Aligned. Zeros if not `present`, without a branch: it would wait for the loads before it.
DISTMK_FN float4 load_four_if(bool present, const float* x) {
  return present ? __ldcg(reinterpret_cast<const float4*>(x)) : float4{0, 0, 0, 0};
}

DISTMK_FN float dot(const float4& a, const float4& b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }

// Four activations times the norm's weights.
DISTMK_FN void store_four(const float4& v, const float4& g, __nv_bfloat16* out) {
  *reinterpret_cast<uint2*>(out) = {pack_bf16(v.x * g.x, v.y * g.y), pack_bf16(v.z * g.z, v.w * g.w)};
}

// A row's squares, of which every thread has some.
DISTMK_FN void keep_squares(const Team& team, uint32_t row, float squares) {
  for (uint32_t step = 16; step; step >>= 1) squares += __shfl_xor_sync(~0u, squares, step);
  if (team.index % 32 == 0) shared().squares[row][team.index / 32] = squares;
}

constexpr uint32_t PIECE = 4 * NUM_CONSUMERS;  // columns that the team loads at once, 16 bytes a thread
constexpr uint32_t IN_FLIGHT = 4;              // pieces: each takes a trip to the second-level cache

// How a task's activations come into shared memory.
enum class Rows {
  ONE,      // aligned, and all of it fits
  ALIGNED,  // any number, of which 16 bytes at a time can be read
  ANY,
};

// Up to MOST rows, block by block: a thread loads its columns of the next block while the one before it is multiplied;
// of rows behind the first AHEAD once it is their turn. No branch or call may stand between two loads, as the first
// would be waited for there.
template <uint32_t MOST, bool ALIGNED>
class BlockStager {
 public:
  DISTMK_FN BlockStager(const Team& team, const Activations& a) : a_(a), team_(team) {}

  // Sends for the block from `k0` on.
  DISTMK_FN void load(uint32_t k0) {
    static_assert(BLOCK_K == PIECE, "a thread has four columns of a block");
    k_ = k0 + 4 * team_.index;
    weight_ = load_columns(a_.norm, a_.norm);
    load_rows<0>();
  }

  // Puts it at `place`, where it is multiplied; `add_squares`: this is the first time that it is seen.
  DISTMK_FN void store(uint32_t place, bool add_squares) {
    auto* column = reinterpret_cast<__nv_bfloat16*>(shared().vector) + place + 4 * team_.index;
    store_rows<0>(add_squares, column);
    if (MOST == AHEAD || a_.num_rows <= AHEAD) return;
    load_rows<MOST - AHEAD>();
    store_rows<MOST - AHEAD>(add_squares, column);
  }

  // Once all blocks were seen.
  DISTMK_FN void keep_all_squares() const {
#pragma unroll
    for (uint32_t row = 0; row < MOST; ++row)
      if (row < a_.num_rows) keep_squares(team_, row, squares_[row]);
  }

 private:
  static constexpr uint32_t AHEAD = 8;  // rows; more would not fit into registers
  static_assert(MOST == AHEAD || MOST == 2 * AHEAD, "");
  const Activations& a_;
  const Team& team_;
  uint32_t k_ = 0;  // of this thread's columns
  float4 weight_, values_[AHEAD];
  float squares_[MOST] = {};

  template <uint32_t FIRST>
  DISTMK_FN void load_rows() {
#pragma unroll
    for (uint32_t i = 0; i < AHEAD; ++i)
      values_[i] = load_columns(a_.x + uint64_t{FIRST + i} * a_.x_stride, FIRST + i < a_.num_rows);
  }
  template <uint32_t FIRST>
  DISTMK_FN void store_rows(bool add_squares, __nv_bfloat16* column) {
    const float4 weight = a_.norm ? weight_ : float4{1, 1, 1, 1};
#pragma unroll
    for (uint32_t i = 0; i < AHEAD; ++i) {
      if (FIRST + i >= a_.num_rows) break;
      if (add_squares) squares_[FIRST + i] += dot(values_[i], values_[i]);
      if (k_ < a_.k_pitch) store_four(values_[i], weight, column + (FIRST + i) * a_.column_stride());
    }
  }

  DISTMK_FN float4 load_columns(const float* from, bool present) const {
    if (ALIGNED) return load_four_if(present && k_ < a_.k, from + k_);
    return present ? load_unaligned_four(from, k_, a_.k) : float4{0, 0, 0, 0};
  }
};

DISTMK_FN uint32_t num_rows(const RankState& state, const LinearArgs& args) {
  if (!args.batch) return 1;
  return (state.near_batch ? state.near_batch : reinterpret_cast<const Batch*>(state.address(args.batch)))->num_rows;
}

DISTMK_FN Rows kind_of_rows(const RankState& state, const LinearArgs& args, uint32_t num_rows) {
  if (!is_aligned(state.address(args.x), args.norm ? state.address(args.norm) : 0, args.k)) return Rows::ANY;
  if (num_rows == 1 && (args.k_pitch + X_PAD) * sizeof(__nv_bfloat16) <= VECTOR_BYTES) return Rows::ONE;
  return num_rows == 1 || args.x_stride % 4 == 0 ? Rows::ALIGNED : Rows::ANY;
}

// Rows::ONE, which is what most tasks have: all of it is in flight at once, and the norm's weights, which no task
// writes, before the activations are ready. False: they never will be.
DISTMK_FN bool stage_row(Context& context, const Activations& a) {
  const Team& team = context.team;
  auto* column = reinterpret_cast<__nv_bfloat16*>(shared().vector);
  float squares = 0;
#pragma unroll 1
  for (uint32_t first = 4 * team.index; first < a.k_pitch || first == 4 * team.index; first += IN_FLIGHT * PIECE) {
    float4 v[IN_FLIGHT], g[IN_FLIGHT];
#pragma unroll
    for (uint32_t i = 0; i < IN_FLIGHT; ++i) {
      const uint32_t k = first + i * PIECE;
      g[i] = a.norm && k < a.k ? __ldcg(reinterpret_cast<const float4*>(a.norm + k)) : float4{1, 1, 1, 1};
    }
    if (!context.inputs_ready()) return false;
#pragma unroll
    for (uint32_t i = 0; i < IN_FLIGHT; ++i) {
      const uint32_t k = first + i * PIECE;
      v[i] = k < a.k ? __ldcg(reinterpret_cast<const float4*>(a.x + k)) : float4{0, 0, 0, 0};
    }
#pragma unroll
    for (uint32_t i = 0; i < IN_FLIGHT; ++i) {
      const uint32_t k = first + i * PIECE;
      squares += dot(v[i], v[i]);
      if (k < a.k_pitch) store_four(v[i], g[i], column + k);
    }
  }
  if (a.norm) keep_squares(team, 0, squares);
  return true;
}

}  // namespace linear
}  // namespace distmk
