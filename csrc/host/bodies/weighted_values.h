// O += P V of attention on the host, for few queries: V in bf16, P and O in float32.
#pragma once
#include "host/simd.h"

namespace distmk::simd {

// NUM_BLOCKS blocks of add_values(), from column d on. V is widened to float32 once for all NUM_Q queries.
template <uint32_t NUM_Q, uint32_t STRIDE, uint32_t NUM_BLOCKS>
void add_blocks(float* out, uint64_t out_stride, const float* weights, const uint16_t* const* values, uint32_t d,
                uint32_t count) {
  Vec acc[NUM_Q][2 * NUM_BLOCKS];
  for (uint32_t q = 0; q < NUM_Q; ++q)
    for (uint32_t i = 0; i < 2 * NUM_BLOCKS; ++i) acc[q][i] = load(out + q * out_stride + d + i * LANES);
  for (uint32_t p = 0; p < count; ++p) {
    Vec value[2 * NUM_BLOCKS];
    for (uint32_t i = 0; i < NUM_BLOCKS; ++i) {
      const Bits block = load_block(values[p] + d + i * BLOCK);
      value[2 * i] = even_of(block);
      value[2 * i + 1] = odd_of(block);
    }
    for (uint32_t q = 0; q < NUM_Q; ++q)
      for (uint32_t i = 0; i < 2 * NUM_BLOCKS; ++i)
        acc[q][i] = add_product(acc[q][i], splat(weights[q * STRIDE + p]), value[i]);
  }
  for (uint32_t q = 0; q < NUM_Q; ++q)
    for (uint32_t i = 0; i < 2 * NUM_BLOCKS; ++i) store(out + q * out_stride + d + i * LANES, acc[q][i]);
}

template <uint32_t NUM_Q, uint32_t STRIDE>
void add_values_of(float* out, uint64_t out_stride, uint32_t head_dim, const float* weights,
                   const uint16_t* const* values, uint32_t count) {
  constexpr uint32_t MOST = LANES < 16 && NUM_Q == 1 ? 4 : 2;  // blocks in registers at once
  uint32_t d = 0;
  for (; d + MOST * BLOCK <= head_dim; d += MOST * BLOCK)
    add_blocks<NUM_Q, STRIDE, MOST>(out, out_stride, weights, values, d, count);
  for (; d + BLOCK <= head_dim; d += BLOCK) add_blocks<NUM_Q, STRIDE, 1>(out, out_stride, weights, values, d, count);
  for (uint32_t q = 0; q < NUM_Q; ++q)
    for (uint32_t rest = d; rest < head_dim; ++rest)
      for (uint32_t p = 0; p < count; ++p)
        out[q * out_stride + rest] += weights[q * STRIDE + p] * from_bf16(values[p][rest]);
}

// out [num_queries, head_dim] += weights [num_queries, STRIDE] x values: the bf16 rows of `count` <= STRIDE positions.
// Three queries share a pass over the values. In each whole block of out, the even elements come first.
template <uint32_t STRIDE>
void add_values(float* out, uint64_t out_stride, uint32_t head_dim, const float* weights, uint32_t num_queries,
                const uint16_t* const* values, uint32_t count) {
  for (uint32_t q = 0; q < num_queries; q += 3, out += 3 * out_stride, weights += 3 * STRIDE) {
    if (num_queries - q == 1)
      add_values_of<1, STRIDE>(out, out_stride, head_dim, weights, values, count);
    else if (num_queries - q == 2)
      add_values_of<2, STRIDE>(out, out_stride, head_dim, weights, values, count);
    else
      add_values_of<3, STRIDE>(out, out_stride, head_dim, weights, values, count);
  }
}

}  // namespace distmk::simd
