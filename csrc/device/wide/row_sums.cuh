// Sums into the residual stream in a wide iteration, with the rows in registers: x (+)= sum of the parts, and x /
// rms(x).
#pragma once
#include "device/attention/lse.cuh"
#include "device/core/shared.cuh"
#include "device/wide/row_vectors.cuh"

namespace distmk {
namespace wide {

// ROWS rows of a worker at once, of at most VECTORS * NUM_CONSUMERS * 4 columns: a thread has float4 number
// team.index, team.index + NUM_CONSUMERS, ... of each. The rows are loaded ROUND at a time, as there are no registers
// for all that is added up.
template <uint32_t ROWS, uint32_t VECTORS>
class RegisterSums {
 public:
  static constexpr uint32_t STEP = NUM_CONSUMERS * 4, MAX_COLS = VECTORS * STEP, ROUND = 8 / VECTORS;
  static_assert(ROUND && ROWS % ROUND == 0 && STEP % WIDE_COLS == 0, "");

  DISTMK_FN RegisterSums(const Context& context, const WideSumArgs& args, const OwnRows& rows)
      : context_(context), args_(args), rows_(rows), col_(context.team.index * 4) {}

  // The worker's rows first, first + 1, ...; in the iteration they are behind `first_row` others.
  DISTMK_FN void run(uint32_t first, uint32_t first_row) {
#pragma unroll
    for (uint32_t i = 0; i < ROWS; i += ROUND) add_up(first + i, i);
    if (first) context_.team.sync();  // all warps have read the last rows' squares
    leave_squares();
    context_.team.sync();
    store(first, first_row);
  }

 private:
  const Context& context_;
  const WideSumArgs& args_;
  const OwnRows& rows_;
  uint32_t col_;
  float4 sums_[ROWS][VECTORS];

  DISTMK_FN static float* squares() { return reinterpret_cast<float*>(shared().work); }  // [ROWS][NUM_WARPS]
  DISTMK_FN bool has(uint32_t row, uint32_t vector) const {
    return row < rows_.count && col_ + vector * STEP < args_.k;
  }

  // Rows `row` to row + ROUND, which become sums `at` and following.
  DISTMK_FN void add_up(uint32_t row, uint32_t at) {
    const uint32_t num_slots = args_.num_ranks * args_.num_splits;
    float* x = context_.at<float>(args_.x) + col_;
    load(row, x, args_.k, args_.add, &sums_[at]);
    for (uint32_t slot = 0; slot < num_slots; slot += 2) {
      float4 loaded[2][ROUND][VECTORS];
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) load(row, parts(slot + i), args_.parts_stride, slot + i < num_slots, loaded[i]);
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i)
#pragma unroll
        for (uint32_t r = 0; r < ROUND; ++r)
#pragma unroll
          for (uint32_t j = 0; j < VECTORS; ++j) sums_[at + r][j] = sum(sums_[at + r][j], loaded[i][r][j]);
    }
#pragma unroll
    for (uint32_t r = 0; r < ROUND; ++r) {
      float* to = x + uint64_t{rows_.at(row + r)} * args_.k;
#pragma unroll
      for (uint32_t j = 0; j < VECTORS; ++j)
        if (has(row + r, j)) *reinterpret_cast<float4*>(to + j * STEP) = sums_[at + r][j];
    }
  }
  DISTMK_FN const float* parts(uint32_t slot) const {
    const uint32_t rank = slot / args_.num_splits, split = slot - rank * args_.num_splits;
    return context_.at<float>(args_.parts) + uint64_t{rank * args_.slots_per_rank + split} * args_.k + col_;
  }
  DISTMK_FN void load(uint32_t row, const float* from, uint32_t stride, bool wanted, float4 (*to)[VECTORS]) const {
#pragma unroll
    for (uint32_t r = 0; r < ROUND; ++r) {
      const float* in_row = from + uint64_t{rows_.at(row + r)} * stride;
#pragma unroll
      for (uint32_t j = 0; j < VECTORS; ++j) load_if(wanted && has(row + r, j), in_row + j * STEP, to[r][j]);
    }
  }

  DISTMK_FN void leave_squares() const {
#pragma unroll
    for (uint32_t r = 0; r < ROWS; ++r) {
      float own = 0.0f;
#pragma unroll
      for (uint32_t j = 0; j < VECTORS; ++j) own += square(sums_[r][j]);
      own = attention::warp_sum(own);
      if (threadIdx.x % 32 == 0) squares()[r * NUM_WARPS + threadIdx.x / 32] = own;
    }
  }
  DISTMK_FN void store(uint32_t first, uint32_t first_row) const {
    float scale[ROWS];
#pragma unroll
    for (uint32_t r = 0; r < ROWS; ++r) {
      float all = 0.0f;
#pragma unroll
      for (uint32_t warp = 0; warp < NUM_WARPS; ++warp) all += squares()[r * NUM_WARPS + warp];
      scale[r] = rsqrtf(__fdividef(all, static_cast<float>(args_.k)) + args_.eps);
    }
    const uint32_t step = args_.tiled ? STEP * WIDE_ROWS : STEP;  // whole blocks of columns
    for (uint32_t rank = 0; rank < args_.num_ranks; ++rank) {
      auto* out = on_rank<__nv_bfloat16>(context_, rank, args_.out);
#pragma unroll
      for (uint32_t r = 0; r < ROWS; ++r) {
        auto* to = out + activation_offset(first_row + rows_.at(first + r), col_, args_.k, args_.tiled);
#pragma unroll
        for (uint32_t j = 0; j < VECTORS; ++j)
          if (has(first + r, j)) store_scaled(to + uint64_t{j} * step, sums_[r][j], scale[r]);
      }
    }
  }
};

template <uint32_t ROWS, uint32_t VECTORS>
DISTMK_FN void sum_rows_in_registers(const Context& context, const WideSumArgs& args, const OwnRows& rows,
                                     uint32_t first_row) {
  RegisterSums<ROWS, VECTORS> sums(context, args, rows);
#pragma unroll 1
  for (uint32_t first = 0; first < rows.count; first += ROWS) sums.run(first, first_row);
}

}  // namespace wide
}  // namespace distmk
