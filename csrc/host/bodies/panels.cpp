#include "host/bodies/panels.h"

#include <algorithm>

namespace distmk::panels {

#if DISTMK_BF16_PRODUCTS

namespace {

typedef uint32_t Words __attribute__((vector_size(64)));

// Swaps the off-diagonal quarters of each square of 2 D x 2 D words.
template <uint32_t D, uint32_t... J>
DISTMK_INLINE void swap_quarters(Words (&rows)[LANES], std::integer_sequence<uint32_t, J...>) {
#pragma GCC unroll 16
  for (uint32_t i = 0; i < LANES; ++i) {
    if (i & D) continue;
    const Words top = rows[i], bottom = rows[i + D];
    rows[i] = __builtin_shufflevector(top, bottom, (J & D ? 16 + J - D : J)...);
    rows[i + D] = __builtin_shufflevector(top, bottom, (J & D ? 16 + J : J + D)...);
  }
}

// Up to 16 pairs of columns of LANES rows, transposed.
DISTMK_INLINE void pack_block(uint32_t* out, const uint16_t* const* rows, uint32_t begin, uint32_t num_cols) {
  const auto mask = static_cast<__mmask32>(num_cols < 32 ? (1u << num_cols) - 1 : ~0u);
  Words words[LANES];
#pragma GCC unroll 16
  for (uint32_t lane = 0; lane < LANES; ++lane)
    words[lane] = rows[lane] ? (Words)_mm512_maskz_loadu_epi16(mask, rows[lane] + begin) : Words{};
  const auto all = std::make_integer_sequence<uint32_t, LANES>{};
  swap_quarters<1>(words, all);
  swap_quarters<2>(words, all);
  swap_quarters<4>(words, all);
  swap_quarters<8>(words, all);
  const uint32_t num_pairs = (num_cols + 1) / 2;
#pragma GCC unroll 16
  for (uint32_t pair = 0; pair < LANES; ++pair)
    if (pair < num_pairs) memcpy(out + pair * COLS, &words[pair], sizeof(Words));
}

}  // namespace

void pack(uint32_t* panel, const uint16_t* const* rows, uint32_t k) {
  for (uint32_t begin = 0; begin < k; begin += 32)
    for (uint32_t half = 0; half < 2; ++half)
      pack_block(panel + begin / 2 * COLS + half * LANES, rows + half * LANES, begin, std::min(k - begin, 32u));
}

#else

void pack(uint32_t* panel, const uint16_t* const* rows, uint32_t k) {
  auto* out = reinterpret_cast<float*>(panel);
  constexpr uint32_t BLOCK = 16;  // columns, so that all rows' cache lines stay in the cache
  for (uint32_t begin = 0; begin < k; begin += BLOCK)
    for (uint32_t lane = 0; lane < COLS; ++lane)
      for (uint32_t i = begin; i < std::min(k, begin + BLOCK); ++i)
        out[uint64_t{i} * COLS + lane] = rows[lane] ? simd::from_bf16(rows[lane][i]) : 0.0f;
  if (k % 2) std::fill_n(out + uint64_t{k} * COLS, COLS, 0.0f);
}

#endif

}  // namespace distmk::panels
