// Packing and micro-kernels of panels.h.
#include "host/bodies/panels.h"

#include <algorithm>

namespace distmk::panels {

#if DISTMK_BF16_PRODUCTS

namespace {

typedef uint16_t Elements __attribute__((vector_size(64)));

// Packs up to 16 pairs of columns of LANES rows, transposed.
DISTMK_INLINE void pack_block(uint32_t* out, const uint16_t* const* rows, uint32_t begin, uint32_t num_cols) {
  const auto mask = static_cast<__mmask32>(num_cols < 32 ? (1u << num_cols) - 1 : ~0u);
  Words words[LANES];
#pragma GCC unroll 16
  for (uint32_t lane = 0; lane < LANES; ++lane)
    words[lane] = rows[lane] ? (Words)_mm512_maskz_loadu_epi16(mask, rows[lane] + begin) : Words{};
  transpose(words);
  const uint32_t num_pairs = (num_cols + 1) / 2;
#pragma GCC unroll 16
  for (uint32_t pair = 0; pair < LANES; ++pair)
    if (pair < num_pairs) memcpy(out + pair * COLS, &words[pair], sizeof(Words));
}

// Stores the elements of two columns interleaved, pair by pair.
template <uint32_t... I>
DISTMK_INLINE void store_pairs(uint32_t* out, Elements first, Elements second, std::integer_sequence<uint32_t, I...>) {
  const Elements left = __builtin_shufflevector(first, second, ((I & 1) * COLS + I / 2)...);
  const Elements right = __builtin_shufflevector(first, second, ((I & 1) * COLS + COLS / 2 + I / 2)...);
  memcpy(out, &left, sizeof left);
  memcpy(out + LANES, &right, sizeof right);
}

}  // namespace

void pack(uint32_t* panel, const uint16_t* const* rows, uint32_t k) {
  for (uint32_t begin = 0; begin < k; begin += 32)
    for (uint32_t half = 0; half < 2; ++half)
      pack_block(panel + begin / 2 * COLS + half * LANES, rows + half * LANES, begin, std::min(k - begin, 32u));
}

void pack_columns(uint32_t* panel, const uint16_t* const* columns, uint32_t k, uint32_t num_rows) {
  const auto mask = static_cast<__mmask32>(num_rows < COLS ? (1u << num_rows) - 1 : ~0u);
  for (uint32_t i = 0; i < k; i += 2, panel += COLS) {
    const __m512i first = _mm512_maskz_loadu_epi16(mask, columns[i]);
    const __m512i second = i + 1 < k ? _mm512_maskz_loadu_epi16(mask, columns[i + 1]) : __m512i{};
    store_pairs(panel, (Elements)first, (Elements)second, std::make_integer_sequence<uint32_t, COLS>{});
  }
}

#else

void pack(uint32_t* panel, const uint16_t* const* rows, uint32_t k) {
  auto* out = reinterpret_cast<float*>(panel);
  constexpr uint32_t BLOCK = 16;  // columns at a time, so that all rows' cache lines stay in the cache
  for (uint32_t begin = 0; begin < k; begin += BLOCK)
    for (uint32_t lane = 0; lane < COLS; ++lane)
      for (uint32_t i = begin; i < std::min(k, begin + BLOCK); ++i)
        out[uint64_t{i} * COLS + lane] = rows[lane] ? simd::from_bf16(rows[lane][i]) : 0.0f;
  if (k % 2) std::fill_n(out + uint64_t{k} * COLS, COLS, 0.0f);
}

void pack_columns(uint32_t* panel, const uint16_t* const* columns, uint32_t k, uint32_t num_rows) {
  auto* out = reinterpret_cast<float*>(panel);
  for (uint32_t i = 0; i < k; ++i, out += COLS)
    for (uint32_t lane = 0; lane < COLS; ++lane) out[lane] = lane < num_rows ? simd::from_bf16(columns[i][lane]) : 0.0f;
  if (k % 2) std::fill_n(out, COLS, 0.0f);
}

#endif

namespace {

// sums += one pair of columns of ROWS rows of X times a panel. pair_of(row) returns the pair as a word.
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
      sums[row][0] = add_product(sums[row][0], left, x);
      sums[row][1] = add_product(sums[row][1], right, x);
    }
  }
#endif
}

template <uint32_t ROWS>
void multiply_tile(const uint32_t* panel, uint32_t k, const uint16_t* x, uint64_t x_stride, float* y, uint64_t y_stride,
                   bool add) {
  Vec sums[ROWS][2];
#pragma GCC unroll 16
  for (uint32_t row = 0; row < ROWS; ++row) {
    sums[row][0] = add ? load(y + row * y_stride) : Vec{};
    sums[row][1] = add ? load(y + row * y_stride + LANES) : Vec{};
  }
  const auto pair_of = [&](uint32_t row) {
    uint32_t pair;
    memcpy(&pair, x + row * x_stride, sizeof pair);
    return pair;
  };
  for (uint32_t pairs = k / 2; pairs; --pairs, x += 2, panel += COLS * WORDS_OF_PAIR)
    multiply_pair<ROWS>(sums, panel, pair_of);
  if (k % 2) multiply_pair<ROWS>(sums, panel, [&](uint32_t row) { return uint32_t{x[row * x_stride]}; });
#pragma GCC unroll 16
  for (uint32_t row = 0; row < ROWS; ++row, y += y_stride) {
    store(y, sums[row][0]);
    store(y + LANES, sums[row][1]);
  }
}

// multiply_tile() for `rows` <= ROWS rows.
template <uint32_t ROWS, class... Arguments>
void choose_tile(uint32_t rows, Arguments... arguments) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS) return multiply_tile<ROWS>(arguments...);
    choose_tile<ROWS - 1>(rows, arguments...);
  }
}

}  // namespace

void multiply(const uint32_t* panel, uint32_t k, const uint16_t* x, uint64_t x_stride, uint32_t num_rows, float* y,
              uint64_t y_stride, bool add) {
  // Tiles are of nearly equal size, because a tile of a single row would be bound by latency.
  const uint32_t num_tiles = (num_rows + TILE_ROWS - 1) / TILE_ROWS;
  for (uint32_t tile = 0; tile < num_tiles; ++tile) {
    const uint32_t begin = num_rows * tile / num_tiles, end = num_rows * (tile + 1) / num_tiles;
    choose_tile<TILE_ROWS>(end - begin, panel, k, x + begin * x_stride, x_stride, y + begin * y_stride, y_stride, add);
  }
}

}  // namespace distmk::panels
