// Y = X W^T for many rows: bf16 W and X, float32 sums. W is packed in panels of COLS rows. A panel has each pair of
// columns of all its rows side by side, so that a pair of X is multiplied by the whole panel at once.
#pragma once
#include "host/simd.h"

namespace distmk::panels {

using namespace simd;

#if DISTMK_BF16_PRODUCTS
constexpr uint32_t TILE_ROWS = 12;     // rows of X at once: as many as registers allow
constexpr uint32_t WORDS_OF_PAIR = 1;  // 32-bit words of a lane's pair of columns: two bf16
#else
constexpr uint32_t TILE_ROWS = 5;
constexpr uint32_t WORDS_OF_PAIR = 2;  // two float32
#endif
constexpr uint32_t COLS = 2 * LANES;  // rows of W in a panel, columns of Y

// 32-bit words of a panel of k columns.
inline uint64_t num_words(uint32_t k) { return uint64_t{(k + 1) / 2} * COLS * WORDS_OF_PAIR; }

// Packs k columns of COLS rows of W. A null row is packed as zeros.
void pack(uint32_t* panel, const uint16_t* const* rows, uint32_t k);

// pack() from columns: each has `num_rows` <= COLS consecutive elements. The other rows are zeros.
void pack_columns(uint32_t* panel, const uint16_t* const* columns, uint32_t k, uint32_t num_rows);

// y[row][column] (+)= x[row] . w[column] for the COLS rows of W in a panel. Every sum is taken in the order of k, so a
// row's results do not depend on the other rows. `y_stride` is at least COLS.
void multiply(const uint32_t* panel, uint32_t k, const uint16_t* x, uint64_t x_stride, uint32_t num_rows, float* y,
              uint64_t y_stride, bool add = false);

}  // namespace distmk::panels
