// O += P V of attention on the host: bf16 V, P and O in float32.
#pragma once
#include "host/simd.h"

namespace distmk::simd {

// NUM_BLOCKS blocks of `add_values`, from column d on: each block of V is widened to float32 once for all NUM_Q
// queries.
template <uint32_t NUM_Q, uint32_t STRIDE, uint32_t NUM_BLOCKS>
void add_block_values(float* out, uint32_t head_dim, const float* weights, const uint16_t* const* values, uint32_t d,
                      uint32_t count) {
  Vec acc[NUM_Q][2 * NUM_BLOCKS];
  for (uint32_t q = 0; q < NUM_Q; ++q)
    for (uint32_t i = 0; i < 2 * NUM_BLOCKS; ++i) acc[q][i] = load(out + uint64_t{q} * head_dim + d + i * LANES);
  for (uint32_t p = 0; p < count; ++p) {
    Vec value[2 * NUM_BLOCKS];
    for (uint32_t i = 0; i < NUM_BLOCKS; ++i) {
      const Bits block = load_block(values[p] + d + i * BLOCK);
      value[2 * i] = even_of(block);
      value[2 * i + 1] = odd_of(block);
    }
    for (uint32_t q = 0; q < NUM_Q; ++q) {
      const Vec weight = splat(weights[q * STRIDE + p]);
      for (uint32_t i = 0; i < 2 * NUM_BLOCKS; ++i) acc[q][i] = add_product(acc[q][i], weight, value[i]);
    }
  }
  for (uint32_t q = 0; q < NUM_Q; ++q)
    for (uint32_t i = 0; i < 2 * NUM_BLOCKS; ++i) store(out + uint64_t{q} * head_dim + d + i * LANES, acc[q][i]);
}

// out [NUM_Q, head_dim] += weights [NUM_Q, STRIDE] x values: the bf16 rows of `count` <= STRIDE positions.
template <uint32_t NUM_Q, uint32_t STRIDE>
void add_values(float* out, uint32_t head_dim, const float* weights, const uint16_t* const* values, uint32_t count) {
  constexpr uint32_t WIDE = NUM_Q == 1 ? 4 : 2;
  uint32_t d = 0;
  for (; d + WIDE * BLOCK <= head_dim; d += WIDE * BLOCK)
    add_block_values<NUM_Q, STRIDE, WIDE>(out, head_dim, weights, values, d, count);
  for (; d + BLOCK <= head_dim; d += BLOCK)
    add_block_values<NUM_Q, STRIDE, 1>(out, head_dim, weights, values, d, count);
  for (uint32_t q = 0; q < NUM_Q; ++q)
    for (uint32_t rest = d; rest < head_dim; ++rest)
      for (uint32_t p = 0; p < count; ++p)
        out[uint64_t{q} * head_dim + rest] += weights[q * STRIDE + p] * from_bf16(values[p][rest]);
}

}  // namespace distmk::simd
