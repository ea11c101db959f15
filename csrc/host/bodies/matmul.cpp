#include "host/bodies/matmul.h"

#include <algorithm>

namespace distmk {

using namespace simd;

namespace {

// A panel of weights and one group of x, both of K_BLOCK blocks, stay in the first-level cache together.
constexpr uint32_t K_BLOCK = 640 / BLOCK;
constexpr uint32_t PANEL = 12;
constexpr uint32_t AHEAD = 512;  // elements from the end of a tile to what is fetched while it starts

struct CarryTag;

// Blocks [begin, end) of some weight rows against one group of x.
struct Job {
  const uint16_t* w;
  const float* x;
  uint32_t k, begin, end;
  float* carry;
  float* const* y;
  uint32_t column;
  bool prefetch, contiguous;  // fetch later weights; this panel is all of its rows, so they follow on it
};

// Left alone, the compiler loads x again for each of the W multiplications, and loads become the bottleneck.
template <uint32_t W>
DISTMK_INLINE Vec in_register(Vec v) {
#if defined(__FMA__)
  if constexpr (W > 1) asm("" : "+x"(v));
#elif defined(__aarch64__)
  if constexpr (W > 1) asm("" : "+w"(v));
#endif
  return v;
}

// A block of each of W weight rows times that of T rows of x.
template <uint32_t W, uint32_t T>
DISTMK_INLINE void step(const uint16_t* w, uint64_t stride, const float* x, Vec (&sums)[W][T]) {
  Vec weights[W];
  for (uint32_t j = 0; j < W; ++j) weights[j] = even_of(load_block(w + j * stride));
  for (uint32_t t = 0; t < T; ++t) {
    const Vec row = in_register<W>(load(x + t * BLOCK));
    for (uint32_t j = 0; j < W; ++j) sums[j][t] = add_product(sums[j][t], weights[j], row);
  }
  for (uint32_t j = 0; j < W; ++j) weights[j] = odd_of(load_block(w + j * stride));
  for (uint32_t t = 0; t < T; ++t) {
    const Vec row = in_register<W>(load(x + t * BLOCK + LANES));
    for (uint32_t j = 0; j < W; ++j) sums[j][t] = add_product(sums[j][t], weights[j], row);
  }
}

// W weight rows against T rows of x. One sum for each pair whatever W and T are, so that they do not show in the
// result.
template <uint32_t W, uint32_t T>
void tile(const Job& job) {
  const uint32_t full = job.k / BLOCK, rest = job.k % BLOCK, num_blocks = full + (rest != 0);
  Vec sums[W][T];
  for (uint32_t j = 0; j < W; ++j)
    for (uint32_t t = 0; t < T; ++t) sums[j][t] = job.begin ? load(job.carry + (j * T + t) * LANES) : Vec{};
  const uint32_t end = std::min(job.end, full);
  const uint16_t* w = job.w + uint64_t{job.begin} * BLOCK;
  const uint16_t* ahead = job.w + uint64_t{W} * job.k + AHEAD;
  const float* x = job.x + uint64_t{job.begin} * T * BLOCK;
  for (uint32_t b = job.begin; b < end; ++b, w += BLOCK, x += T * BLOCK) {
    if (job.prefetch) {
      // In the order of memory where that can be, which memory likes best: as many bytes a step as a step uses.
      if (job.contiguous)
        for (uint32_t j = 0; j < W; j += 2) __builtin_prefetch(ahead + (b * W + j) * BLOCK);
      else
        for (uint32_t j = 0; j < W; ++j) __builtin_prefetch(w + uint64_t{PANEL + j} * job.k);
    }
    step<W, T>(w, job.k, x, sums);
  }
  if (job.end < num_blocks) {
    for (uint32_t j = 0; j < W; ++j)
      for (uint32_t t = 0; t < T; ++t) store(job.carry + (j * T + t) * LANES, sums[j][t]);
    return;
  }
  if (rest) {
    uint16_t last[W * BLOCK] = {};
    for (uint32_t j = 0; j < W; ++j) memcpy(last + j * BLOCK, w + uint64_t{j} * job.k, rest * sizeof(uint16_t));
    step<W, T>(last, BLOCK, x, sums);
  }
  for (uint32_t j = 0; j < W; ++j)
    for (uint32_t t = 0; t < T; ++t) job.y[t][job.column + j] = sum_of(sums[j][t]);
}

template <uint32_t T>
uint32_t run_tile(const Job& job, uint32_t rows_left) {
  constexpr uint32_t WIDE = T <= 2 ? 4 : T == 3 ? 3 : 2;  // as many as there are registers for
  if (rows_left >= WIDE) {
    tile<WIDE, T>(job);
    return WIDE;
  }
  if (rows_left >= 2) {
    tile<2, T>(job);
    return 2;
  }
  tile<1, T>(job);
  return 1;
}

uint32_t run_tile(uint32_t group_size, const Job& job, uint32_t rows_left) {
  switch (group_size) {
    case 1:
      return run_tile<1>(job, rows_left);
    case 2:
      return run_tile<2>(job, rows_left);
    case 3:
      return run_tile<3>(job, rows_left);
    case 4:
      return run_tile<4>(job, rows_left);
    case 5:
      return run_tile<5>(job, rows_left);
    default:
      return run_tile<6>(job, rows_left);
  }
}

}  // namespace

void PackedRows::set(uint32_t row, const float* x, float scale) {
  uint32_t group = 0;
  while (group_begin(group + 1) <= row) ++group;
  const uint32_t first = group_begin(group);
  const uint64_t stride = uint64_t{group_begin(group + 1) - first} * BLOCK;
  float* out = memory_ + first * padded(k_) + (row - first) * BLOCK;
  uint32_t i = 0;
  for (; i + BLOCK <= k_; i += BLOCK, out += stride) split_block(out, load(x + i) * scale, load(x + i + LANES) * scale);
  if (i == k_) return;
  float last[BLOCK] = {};
  for (uint32_t j = 0; i + j < k_; ++j) last[j] = x[i + j] * scale;
  split_block(out, load(last), load(last + LANES));
}

void matmul(const uint16_t* w, uint32_t n, const PackedRows& x, float* const* y, uint32_t column) {
  const uint32_t k = x.k(), num_blocks = (k + BLOCK - 1) / BLOCK;
  // One row of x needs no blocking: it stays in the cache, and weights are best read straight through.
  const bool single = x.num_rows() == 1;
  const uint32_t num_passes = single ? 1 : (num_blocks + K_BLOCK - 1) / K_BLOCK;
  const uint32_t panel = single ? n : PANEL, k_block = (num_blocks + num_passes - 1) / num_passes;
  float* carry = num_passes > 1 ? scratch<CarryTag>(uint64_t{PANEL} * x.num_rows() * LANES) : nullptr;
  for (uint32_t first = 0; first < n; first += panel) {
    const uint32_t last = std::min(n, first + panel);
    for (uint32_t begin = 0; begin < num_blocks; begin += k_block) {
      const uint32_t end = std::min(begin + k_block, num_blocks);
      for (uint32_t group = 0; group < x.num_groups(); ++group) {
        const uint32_t row = x.group_begin(group), size = x.group_begin(group + 1) - row;
        for (uint32_t j = first; j < last;) {
          float* sums = carry ? carry + (uint64_t{row} * PANEL + (j - first) * size) * LANES : nullptr;
          const Job job{w + uint64_t{j} * k, x.group(group), k, begin, end, sums, y + row, column + j,
                        group == 0,          num_passes == 1};
          j += run_tile(size, job, last - j);
        }
      }
    }
  }
}

}  // namespace distmk
