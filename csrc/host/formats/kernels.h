// Decoding and products of rows in a weight format, made of the format's `load` (row_format.h).
#pragma once
#include <algorithm>

#include "host/formats/row_format.h"

namespace distmk {

template <class Rows>
void decode_row(const uint8_t* row, uint32_t k, uint32_t begin, uint32_t end, float* out) {
  using namespace simd;
  constexpr uint32_t COLS = Rows::GROUP;
  for (uint32_t index = begin / COLS; begin < end; ++index) {
    const Group<COLS> group = Rows::load(row, k, index);
    const uint32_t first = index * COLS, last = std::min(end, first + COLS);
    float whole[COLS];
    float* to = last - begin == COLS ? out : whole;
    for (uint32_t i = 0; i < Group<COLS>::NUM_VECTORS; ++i) {
      const Vec scaled = Rows::HAS_OFFSETS ? add_product(splat(group.offset), group.codes[i], splat(group.scale))
                                           : group.codes[i] * group.scale;
      store(to + i * LANES, scaled);
    }
    if (to == whole) memcpy(out, whole + (begin - first), (last - begin) * sizeof(float));
    out += last - begin, begin = last;
  }
}

// Groups of a block, of which rows have a whole number: a group's place in its block is then known at compile time.
template <class Rows>
constexpr uint32_t groups_per_block() {
  if constexpr (requires { Rows::PER_BLOCK; }) return Rows::PER_BLOCK;
  return 1;
}

// Products of one row of weights and T rows of x. Codes stay in registers, and the sum of a group is scaled as a whole.
template <class Rows, uint32_t T>
DISTMK_INLINE void multiply_row(const uint8_t* weights, uint32_t k, const FloatRows& x, uint32_t first_row,
                                float* const* y, uint32_t column) {
  using namespace simd;
  constexpr uint32_t COLS = Rows::GROUP, PER_BLOCK = groups_per_block<Rows>();
  Vec sums[T] = {};
  [[maybe_unused]] float offsets[T] = {};
  const float *rows = x.row(first_row), *row_sums = x.sums_of(first_row);
  const uint64_t stride = x.stride, sum_stride = x.stride / FloatRows::COLS;
  const auto add_group = [&](uint32_t index) __attribute__((always_inline)) {
    const Group<COLS> group = Rows::load(weights, k, index);
    const Vec scale = splat(group.scale);
#pragma GCC unroll 8
    for (uint32_t t = 0; t < T; ++t) {
      const float* at = rows + t * stride + uint64_t{index} * COLS;
      Vec sum = group.codes[0] * load(at);
#pragma GCC unroll 8
      for (uint32_t i = 1; i < Group<COLS>::NUM_VECTORS; ++i)
        sum = add_product(sum, group.codes[i], load(at + i * LANES));
      sums[t] = add_product(sums[t], sum, scale);
      if constexpr (Rows::HAS_OFFSETS) {
        static_assert(COLS == FloatRows::COLS);
        offsets[t] = __builtin_fmaf(group.offset, row_sums[t * sum_stride + index], offsets[t]);
      }
    }
  };
  for (uint32_t begin = 0; begin < (k + COLS - 1) / COLS; begin += PER_BLOCK) {
#pragma GCC unroll 16
    for (uint32_t i = 0; i < PER_BLOCK; ++i) add_group(begin + i);
  }
#pragma GCC unroll 8
  for (uint32_t t = 0; t < T; ++t) y[first_row + t][column] = sum_of(sums[t]) + (Rows::HAS_OFFSETS ? offsets[t] : 0.0f);
}

template <class Rows>
void multiply_rows(const uint8_t* rows, uint32_t k, uint32_t n, const FloatRows& x, float* const* y, uint32_t column) {
  const uint64_t row_bytes = Rows::row_bytes(k);
  for (uint32_t j = 0; j < n; ++j, rows += row_bytes) {
    uint32_t row = 0;
    for (; row + 8 <= x.num_rows; row += 8) multiply_row<Rows, 8>(rows, k, x, row, y, column + j);
    if (row + 4 <= x.num_rows) multiply_row<Rows, 4>(rows, k, x, row, y, column + j), row += 4;
    if (row + 2 <= x.num_rows) multiply_row<Rows, 2>(rows, k, x, row, y, column + j), row += 2;
    if (row < x.num_rows) multiply_row<Rows, 1>(rows, k, x, row, y, column + j);
  }
}

}  // namespace distmk
