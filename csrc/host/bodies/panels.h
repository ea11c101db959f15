// Y = X W^T of many rows: bf16 W and X, float32 sums. W is packed in panels of a few of its rows, each pair of columns
// of all of them side by side, so that a pair of a row of X is multiplied by the whole panel at once.
#pragma once
#include "host/bodies/wide_simd.h"

namespace distmk::panels {

using namespace wide;

#if DISTMK_BF16_PRODUCTS
constexpr uint32_t TILE_ROWS = 12;     // rows of X that are multiplied at once: as many as registers allow
constexpr uint32_t WORDS_OF_PAIR = 1;  // 32-bit words of a lane's pair of columns in a panel: two bf16
#else
constexpr uint32_t TILE_ROWS = 5;
constexpr uint32_t WORDS_OF_PAIR = 2;  // two float32
#endif
constexpr uint32_t COLS = 2 * LANES;  // rows of W in a panel, columns of Y

// 32-bit words of a panel of k columns.
inline uint64_t num_words(uint32_t k) { return uint64_t{(k + 1) / 2} * COLS * WORDS_OF_PAIR; }

// Packs k columns of COLS rows of W; a null row is one of zeros.
void pack(uint32_t* panel, const uint16_t* const* rows, uint32_t k);

// sums += one pair of columns of ROWS rows of X times a panel; `pair_of(row)`: the pair as a word.
template <uint32_t ROWS, class PairOf>
DISTMK_INLINE void multiply_pair(Vec (&sums)[ROWS][2], const uint32_t* panel, const PairOf& pair_of) {
#if DISTMK_BF16_PRODUCTS
  const auto left = (__m512bh)_mm512_loadu_si512(panel), right = (__m512bh)_mm512_loadu_si512(panel + LANES);
#pragma GCC unroll 16
  for (uint32_t row = 0; row < ROWS; ++row) {
    const auto x = (__m512bh)_mm512_set1_epi32(static_cast<int>(pair_of(row)));
    sums[row][0] = _mm512_dpbf16_ps(sums[row][0], left, x);
    sums[row][1] = _mm512_dpbf16_ps(sums[row][1], right, x);
  }
#else
  const auto* weights = reinterpret_cast<const float*>(panel);
#pragma GCC unroll 2
  for (uint32_t half = 0; half < 2; ++half) {
    const Vec left = load(weights + half * COLS), right = load(weights + half * COLS + LANES);
#pragma GCC unroll 16
    for (uint32_t row = 0; row < ROWS; ++row) {
      const simd::Bits pair = simd::Bits{} + pair_of(row);
      const Vec x = half ? simd::odd_of(pair) : simd::even_of(pair);
      sums[row][0] = simd::add_product(sums[row][0], left, x);
      sums[row][1] = simd::add_product(sums[row][1], right, x);
    }
  }
#endif
}

// store(row, columns [0, LANES), the others) of ROWS rows of X, k columns each, times a panel. Every sum is taken in
// the order of k, so that a row's result does not depend on the other rows.
template <uint32_t ROWS, class Store>
void multiply_tile(const uint32_t* panel, const uint16_t* x, uint64_t stride, uint32_t k, const Store& store) {
  Vec sums[ROWS][2] = {};
  const auto pair_of = [&](uint32_t row) {
    uint32_t pair;
    memcpy(&pair, x + row * stride, sizeof pair);
    return pair;
  };
  for (uint32_t pairs = k / 2; pairs; --pairs, x += 2, panel += COLS * WORDS_OF_PAIR)
    multiply_pair<ROWS>(sums, panel, pair_of);
  if (k % 2) multiply_pair<ROWS>(sums, panel, [&](uint32_t row) { return uint32_t{x[row * stride]}; });
#pragma GCC unroll 16
  for (uint32_t row = 0; row < ROWS; ++row) store(row, sums[row][0], sums[row][1]);
}

// As multiply_tile(), of up to TILE_ROWS rows.
template <uint32_t ROWS = TILE_ROWS, class Store>
void multiply(uint32_t num_rows, const uint32_t* panel, const uint16_t* x, uint64_t stride, uint32_t k,
              const Store& store) {
  if constexpr (ROWS > 0) {
    if (num_rows == ROWS) return multiply_tile<ROWS>(panel, x, stride, k, store);
    multiply<ROWS - 1>(num_rows, panel, x, stride, k, store);
  }
}

}  // namespace distmk::panels
