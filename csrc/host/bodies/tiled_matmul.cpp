// AMX kernels of tiled_matmul.h.
#include "host/bodies/tiled_matmul.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "host/simd.h"

namespace distmk {

#if DISTMK_TILES

using namespace tiles;
using simd::Words, simd::transpose;

namespace {

struct CopyTag;

// Tile registers: sums of up to 2 x 2 tiles, then weights, then x.
constexpr uint32_t SUMS = 0, WEIGHTS = 4, X = 6;
constexpr uint32_t PREFETCH_DISTANCE = 4 * COLS;  // elements ahead, past the end of a row in the next one

template <uint32_t... I, class F>
DISTMK_INLINE void unrolled(std::integer_sequence<uint32_t, I...>, F&& f) {
  (f(std::integral_constant<uint32_t, I>{}), ...);
}
// Calls f(0) to f(COUNT - 1) with constants.
template <uint32_t COUNT, class F>
DISTMK_INLINE void unrolled(F&& f) {
  unrolled(std::make_integer_sequence<uint32_t, COUNT>{}, std::forward<F>(f));
}

// Multiplies one block of W tiles of weight rows by one block of T tiles of x, which are `x_stride` elements apart.
template <uint32_t W, uint32_t T, uint32_t PARTS>
DISTMK_INLINE void multiply_block(const uint16_t* const (&w)[W], uint64_t stride, const uint16_t* x,
                                  uint64_t x_stride) {
  unrolled<W>([&](auto j) { tiles::load<WEIGHTS + j>(w[j], stride); });
  unrolled<PARTS>([&](auto part) {
    unrolled<T>([&](auto t) {
      tiles::load<X + t>(x + t * x_stride + part * ELEMENTS, 64);
      unrolled<W>([&](auto j) { multiply<SUMS + j * T + t, WEIGHTS + j, X + t>(); });
    });
  });
}

struct Operands {
  const uint16_t* w;  // row 0
  uint32_t n;         // rows, at least 16
  uint64_t stride;    // elements between rows
  TiledRows x;
  float* const* y;
  uint32_t column;
  uint32_t num_stored;  // rows of w whose products are stored, if n is 16
};

// Stores the sums of the 16 weight rows from `row` on to y.
template <uint32_t TILE>
void store_sums(const Operands& in, uint32_t row, uint32_t group) {
  alignas(64) float sums[ROWS * ROWS];
  tiles::store<TILE>(sums);
  const uint32_t first = group * ROWS, num_rows = std::min(ROWS, in.x.num_rows - first);
  if (num_rows <= 2) {
    for (uint32_t t = 0; t < num_rows; ++t)
      for (uint32_t j = 0; j < in.num_stored; ++j) in.y[first + t][in.column + row + j] = sums[j * ROWS + t];
    return;
  }
  Words rows[ROWS];
  memcpy(rows, sums, sizeof rows);
  transpose(rows);
  for (uint32_t t = 0; t < num_rows; ++t)
    memcpy(in.y[first + t] + in.column + row, &rows[t], in.num_stored * sizeof(float));
}

// Multiplies W tiles of weight rows from row `first` on by T groups of x from `group` on. The last tile of weights
// overlaps the one before it, so that it does not reach past w.
template <uint32_t W, uint32_t T, uint32_t PARTS>
void kernel(const Operands& in, uint32_t first, uint32_t group) {
  const uint64_t x_stride = in.x.group_elements();
  const uint32_t num_full = static_cast<uint32_t>(in.x.k / COLS), rest = in.x.k % COLS;
  uint32_t rows[W];
  const uint16_t* w[W];
  for (uint32_t j = 0; j < W; ++j) {
    rows[j] = std::min(first + j * ROWS, in.n - ROWS);
    w[j] = in.w + rows[j] * in.stride;
  }
  unrolled<W * T>([](auto sum) { zero<SUMS + sum>(); });
  const uint16_t* x = in.x.group(group);
  for (uint32_t block = 0; block < num_full; ++block, x += PARTS * ELEMENTS) {
    if (group == 0)
      for (uint32_t j = 0; j < W; ++j)
        for (uint32_t i = 0; i < ROWS; ++i) __builtin_prefetch(w[j] + i * in.stride + PREFETCH_DISTANCE);
    multiply_block<W, T, PARTS>(w, in.stride * sizeof(uint16_t), x, x_stride);
    for (uint32_t j = 0; j < W; ++j) w[j] += COLS;
  }
  if (rest) {
    alignas(64) uint16_t last[W][ELEMENTS] = {};
    const uint16_t* last_w[W];
    for (uint32_t j = 0; j < W; ++j) {
      last_w[j] = last[j];
      for (uint32_t i = 0; i < ROWS; ++i) memcpy(last[j] + i * COLS, w[j] + i * in.stride, rest * sizeof(uint16_t));
    }
    multiply_block<W, T, PARTS>(last_w, COLS * sizeof(uint16_t), x, x_stride);
  }
  unrolled<W * T>([&](auto sum) { store_sums<SUMS + sum>(in, rows[sum / T], group + sum % T); });
}

template <uint32_t PARTS>
void multiply_all(const Operands& in) {
  const Registers registers;
  const uint32_t num_groups = in.x.num_groups();
  for (uint32_t row = 0; row < in.n;) {
    // With one group memory is the bottleneck, and 16 rows at a time are read faster than 32.
    const bool two = num_groups > 1 && row + ROWS < in.n;
    for (uint32_t group = 0; group < num_groups; group += 2) {
      if (group + 1 < num_groups)
        two ? kernel<2, 2, PARTS>(in, row, group) : kernel<1, 2, PARTS>(in, row, group);
      else
        two ? kernel<2, 1, PARTS>(in, row, group) : kernel<1, 1, PARTS>(in, row, group);
    }
    row += two ? 2 * ROWS : ROWS;
  }
}

}  // namespace

void TiledRows::set(uint32_t row, const float* x) const {
  uint16_t* out = group(row / ROWS) + row % ROWS * COLS;
  for (uint32_t i = 0; i < k; i += COLS, out += num_parts * ELEMENTS) {
    float values[COLS] = {};
    memcpy(values, x + i, std::min(COLS, k - i) * sizeof(float));
    simd::split_bf16<COLS>(values, num_parts, out, ELEMENTS);
  }
}

void TiledRows::finish() const {
  for (uint32_t index = 0; index < num_groups(); ++index) {
    const uint32_t size = std::min(ROWS, num_rows - index * ROWS);
    uint16_t* tile = group(index);
    for (uint32_t i = 0; i < num_blocks() * num_parts; ++i, tile += ELEMENTS) {
      Words rows[ROWS] = {};
      memcpy(rows, tile, size * sizeof(Words));
      transpose(rows);
      memcpy(tile, rows, sizeof rows);
    }
  }
}

void tiled_matmul(const uint16_t* w, uint32_t n, const TiledRows& x, float* const* y, uint32_t column) {
  Operands in{w, n, x.k, x, y, column, ROWS};
  if (n < ROWS) {  // a copy, padded with rows of zeros
    const uint64_t stride = uint64_t{x.num_blocks()} * COLS;
    auto* copy = reinterpret_cast<uint16_t*>(simd::scratch<CopyTag>(ROWS * stride / 2));
    memset(copy, 0, ROWS * stride * sizeof(uint16_t));
    for (uint32_t row = 0; row < n; ++row) memcpy(copy + row * stride, w + uint64_t{row} * x.k, x.k * sizeof(uint16_t));
    in.w = copy, in.n = ROWS, in.stride = stride, in.num_stored = n;
  }
  if (x.num_parts == 3)
    multiply_all<3>(in);
  else
    multiply_all<1>(in);
}

#else

void TiledRows::set(uint32_t, const float*) const { abort(); }
void TiledRows::finish() const { abort(); }
void tiled_matmul(const uint16_t*, uint32_t, const TiledRows&, float* const*, uint32_t) { abort(); }

#endif

}  // namespace distmk
