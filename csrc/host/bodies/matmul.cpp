// Micro-kernels of matmul.h, for processors without AMX.
#include "host/bodies/matmul.h"

#include <algorithm>

namespace distmk {

using namespace simd;

namespace {

// Cache blocking: PANEL weight rows and one group of x, MAX_PASS_BLOCKS blocks of each, fit into the L1 cache together.
// More columns take several passes over k, and partial sums are kept in memory in between.
constexpr uint32_t MAX_PASS_BLOCKS = 640 / BLOCK;
constexpr uint32_t PANEL = 12;
constexpr uint32_t PREFETCH_DISTANCE = 512;  // elements past the end of the micro-kernel's weight rows

struct PartialSumsTag;

// Input of one micro-kernel: blocks [begin, end) of some weight rows, times one group of x.
struct Operands {
  const uint16_t* w;
  const float* x;
  uint32_t k, begin, end;
  float* partial_sums;  // kept between passes
  float* const* y;
  uint32_t column;
  bool prefetch;    // of weights: only once for all groups of x
  bool contiguous;  // weights are read in the order of memory, as there is a single pass
};

// Keeps x in a register. Otherwise the compiler would load it again for each of the W products, and loads would be the
// bottleneck.
template <uint32_t W>
DISTMK_INLINE Vec in_register(Vec v) {
#if defined(__FMA__)
  if constexpr (W > 1) asm("" : "+v"(v));
#elif defined(__aarch64__)
  if constexpr (W > 1) asm("" : "+w"(v));
#endif
  return v;
}

// The weights that part `part` of a block of x is multiplied by.
DISTMK_INLINE Vec multiplied_by(Bits weights, [[maybe_unused]] uint32_t part) {
#if DISTMK_BF16_PRODUCTS
  return reinterpret_cast<Vec>(weights);
#else
  return part ? odd_of(weights) : even_of(weights);
#endif
}
DISTMK_INLINE Vec add_products(Vec sum, Vec weights, Vec x) {
#if DISTMK_BF16_PRODUCTS
  return _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)x);
#else
  return add_product(sum, weights, x);
#endif
}

// sums += one block of W weight rows times one block of T rows of x, in PARTS.
template <uint32_t W, uint32_t T, uint32_t PARTS>
DISTMK_INLINE void multiply_block(const uint16_t* w, uint64_t stride, const float* x, Vec (&sums)[W][T]) {
  Vec weights[W];
  for (uint32_t part = 0; part < PARTS; ++part) {
    for (uint32_t j = 0; j < W; ++j) weights[j] = multiplied_by(load_block(w + j * stride), part);
    for (uint32_t t = 0; t < T; ++t) {
      const Vec row = in_register<W>(load(x + (t * PARTS + part) * LANES));
      for (uint32_t j = 0; j < W; ++j) sums[j][t] = add_products(sums[j][t], weights[j], row);
    }
  }
}

// W weight rows times T rows of x. Each pair of rows has one vector of sums whatever W and T are, so results do not
// depend on them.
template <uint32_t W, uint32_t T, uint32_t PARTS>
void micro_kernel(const Operands& in) {
  const uint32_t num_full = in.k / BLOCK, rest = in.k % BLOCK, num_blocks = num_full + (rest != 0);
  Vec sums[W][T];
  for (uint32_t j = 0; j < W; ++j)
    for (uint32_t t = 0; t < T; ++t) sums[j][t] = in.begin ? load(in.partial_sums + (j * T + t) * LANES) : Vec{};
  const uint32_t end = std::min(in.end, num_full);
  const uint16_t* w = in.w + uint64_t{in.begin} * BLOCK;
  const uint16_t* ahead = in.w + uint64_t{W} * in.k + PREFETCH_DISTANCE;
  const float* x = in.x + uint64_t{in.begin} * T * PARTS * LANES;
  for (uint32_t b = in.begin; b < end; ++b, w += BLOCK, x += T * PARTS * LANES) {
    if (in.prefetch) {
      // Prefetches as many bytes as a block uses, in the order of memory if possible, because that is fastest.
      if (in.contiguous)
        for (uint32_t i = 0; i < W * BLOCK; i += 32) __builtin_prefetch(ahead + b * W * BLOCK + i);
      else
        for (uint32_t j = 0; j < W; ++j) __builtin_prefetch(w + uint64_t{PANEL + j} * in.k);
    }
    multiply_block<W, T, PARTS>(w, in.k, x, sums);
  }
  if (in.end < num_blocks) {
    for (uint32_t j = 0; j < W; ++j)
      for (uint32_t t = 0; t < T; ++t) store(in.partial_sums + (j * T + t) * LANES, sums[j][t]);
    return;
  }
  if (rest) {
    uint16_t last[W * BLOCK] = {};
    for (uint32_t j = 0; j < W; ++j) memcpy(last + j * BLOCK, w + uint64_t{j} * in.k, rest * sizeof(uint16_t));
    multiply_block<W, T, PARTS>(last, BLOCK, x, sums);
  }
  for (uint32_t j = 0; j < W; ++j)
    for (uint32_t t = 0; t < T; ++t) in.y[t][in.column + j] = sum_of(sums[j][t]);
}

// Multiplies as many weight rows of the `rows_left` as registers allow by a group of up to T rows. Returns how many.
template <uint32_t PARTS, uint32_t T = PackedRows::GROUP>
uint32_t run_micro_kernel(uint32_t group_size, const Operands& in, uint32_t rows_left) {
  constexpr uint32_t MOST = T <= 2 || DISTMK_BF16_PRODUCTS ? 4 : T == 3 ? 3 : 2;
  if constexpr (T > 1)
    if (group_size < T) return run_micro_kernel<PARTS, T - 1>(group_size, in, rows_left);
  if (rows_left >= MOST) {
    micro_kernel<MOST, T, PARTS>(in);
    return MOST;
  }
  if (rows_left >= 2) {
    micro_kernel<2, T, PARTS>(in);
    return 2;
  }
  micro_kernel<1, T, PARTS>(in);
  return 1;
}

// Packs a block of a row of x.
DISTMK_INLINE void pack_block(float* out, const float* x, [[maybe_unused]] uint32_t num_parts) {
#if DISTMK_BF16_PRODUCTS
  split_bf16<BLOCK>(x, num_parts, reinterpret_cast<uint16_t*>(out), BLOCK);
#else
  split_block(out, load(x), load(x + LANES));
#endif
}

}  // namespace

void PackedRows::set(uint32_t row, const float* x) {
  if (tiled_) return tiles_.set(row, x);
  uint32_t group = 0;
  while (group_begin(group + 1) <= row) ++group;
  const uint32_t first = group_begin(group);
  const uint64_t block_floats = num_parts_ * LANES, stride = (group_begin(group + 1) - first) * block_floats;
  float* out = memory_ + first * row_floats() + (row - first) * block_floats;
  uint32_t i = 0;
  for (; i + BLOCK <= k_; i += BLOCK, out += stride) pack_block(out, x + i, num_parts_);
  if (i == k_) return;
  float last[BLOCK] = {};
  memcpy(last, x + i, (k_ - i) * sizeof(float));
  pack_block(out, last, num_parts_);
}

namespace {

template <uint32_t PARTS>
void multiply(const uint16_t* w, uint32_t n, const PackedRows& x, float* const* y, uint32_t column) {
  const uint32_t k = x.k(), num_blocks = (k + BLOCK - 1) / BLOCK;
  // A single row of x needs no cache blocking: it stays in the cache, and weights are read fastest straight through.
  const bool single = x.num_rows() == 1;
  const uint32_t num_passes = single ? 1 : (num_blocks + MAX_PASS_BLOCKS - 1) / MAX_PASS_BLOCKS;
  const uint32_t panel = single ? n : PANEL, pass_blocks = (num_blocks + num_passes - 1) / num_passes;
  float* partial_sums = num_passes > 1 ? scratch<PartialSumsTag>(uint64_t{PANEL} * x.num_rows() * LANES) : nullptr;
  for (uint32_t first = 0; first < n; first += panel) {
    const uint32_t last = std::min(n, first + panel);
    for (uint32_t begin = 0; begin < num_blocks; begin += pass_blocks) {
      const uint32_t end = std::min(begin + pass_blocks, num_blocks);
      for (uint32_t group = 0; group < x.num_groups(); ++group) {
        const uint32_t row = x.group_begin(group), size = x.group_begin(group + 1) - row;
        for (uint32_t j = first; j < last;) {
          float* sums = partial_sums ? partial_sums + (uint64_t{row} * PANEL + (j - first) * size) * LANES : nullptr;
          const Operands in{w + uint64_t{j} * k, x.group(group), k, begin, end, sums, y + row, column + j,
                            group == 0,          num_passes == 1};
          j += run_micro_kernel<PARTS>(size, in, last - j);
        }
      }
    }
  }
}

}  // namespace

void matmul(const uint16_t* w, uint32_t n, const PackedRows& x, float* const* y, uint32_t column) {
  if (x.tiled()) return tiled_matmul(w, n, x.tiles(), y, column);
  x.num_parts() == 1 ? multiply<1>(w, n, x, y, column) : multiply<2>(w, n, x, y, column);
}

}  // namespace distmk
