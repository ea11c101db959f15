// How the host reads the rows of a matrix in a weight format. Each format's header has a struct <Name>Rows; all.h lists
// them, and find.cpp makes a RowFormat of each. For bf16 it is empty. Otherwise it has:
//
//   static constexpr uint32_t GROUP: columns that `load` gives at a time, a multiple of simd::LANES
//   static constexpr uint32_t PER_BLOCK: groups of a block, if rows are made of whole blocks
//   static constexpr bool HAS_OFFSETS: whether Group::offset is used
//   static uint64_t row_bytes(uint32_t k): bytes of a row of k elements. `load` reads no others, even if the last group
//     has columns beyond k, which are any finite numbers.
//   static Group<GROUP> load(const uint8_t* row, uint32_t k, uint32_t group)
#pragma once
#include "abi.h"
#include "host/formats/codes.h"

namespace distmk {

// Elements of a group of columns: codes * scale + offset, the numbers that Python's `values` gives.
template <uint32_t COLS>
struct Group {
  static_assert(COLS % simd::LANES == 0);
  static constexpr uint32_t NUM_VECTORS = COLS / simd::LANES;
  simd::Vec codes[NUM_VECTORS];
  float scale, offset = 0.0f;
};

// A few rows of x for products with rows of a matrix: the values of bf16 in float32, as many columns as a row stores in
// whole groups. Columns that a task does not have are zero.
struct FloatRows {
  static constexpr uint32_t COLS = 32;  // columns of a sum: a multiple of every GROUP with offsets

  float *memory, *sums;
  uint32_t num_rows, lead, k;
  uint64_t stride;
  const int32_t* order;  // of the elements of x; null: their own

  // Holds `num_rows` rows of k columns behind `lead` others, of rows of `pitch` columns, in memory of the calling
  // thread, which the next FloatRows<Tag> takes over.
  template <class Tag>
  static FloatRows in_scratch(uint32_t num_rows, uint32_t lead, uint32_t k, uint32_t pitch,
                              const int32_t* order = nullptr) {
    struct FloatTag;
    const uint64_t stride = (uint64_t{pitch} + COLS - 1) / COLS * COLS;
    float* memory = num_rows ? simd::scratch<FloatTag>(num_rows * (stride + stride / COLS)) : nullptr;
    return {memory, memory + num_rows * stride, num_rows, lead, k, stride, order};
  }
  const float* row(uint32_t index) const { return memory + index * stride; }
  const float* sums_of(uint32_t index) const { return sums + index * (stride / COLS); }  // of each COLS columns
  void set(uint32_t index, const float* x) const {
    float *out = memory + index * stride, *sum = sums + index * (stride / COLS);
    memset(out, 0, stride * sizeof(float));
    if (!order) memcpy(out + lead, x, k * sizeof(float));
    for (uint32_t i = 0; order && i < k; ++i)
      if (const auto from = static_cast<uint32_t>(order[i]); from < k) out[lead + i] = x[from];
    for (uint64_t i = 0; i < stride; i += COLS) {
      simd::Vec total{};
      for (uint32_t j = 0; j < COLS; j += simd::LANES) total += simd::load(out + i + j);
      sum[i / COLS] = simd::sum_of(total);
    }
  }
};

struct RowFormat {
  // Columns [begin, end) of a row of k elements in float32.
  using Decode = void(const uint8_t* row, uint32_t k, uint32_t begin, uint32_t end, float* out);
  // y[row][column + j] = x[row] . row j, for j < n rows from `rows` on. The order of each sum depends on k alone, so a
  // row's results do not depend on the other rows.
  using Multiply = void(const uint8_t* rows, uint32_t k, uint32_t n, const FloatRows& x, float* const* y,
                        uint32_t column);

  uint64_t row_bytes;
  Decode* decode;  // null: rows are bf16
  Multiply* multiply;
};

// The format `id`, which `check` has found to exist, of rows of k elements.
RowFormat row_format(uint32_t id, uint32_t k);

}  // namespace distmk
