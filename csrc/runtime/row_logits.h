// The logits of a row of the batch over the whole vocabulary: a section for each rank's shard, one after another.
#pragma once
#include <float.h>

#include "runtime/argmax.h"

namespace distmk {

constexpr uint32_t LOGITS_PER_VECTOR = 4;

struct RowLogits {
  float* logits;
  uint32_t vocab, num_sections, stride;  // stride: floats from one section to the next, a multiple of a vector

  // The first token of a section, as distmk/model/shards.py divides the vocabulary.
  DISTMK_FN uint32_t section_begin(uint32_t section) const {
    return static_cast<uint32_t>(uint64_t{vocab} * section / num_sections);
  }
  DISTMK_FN float* at(uint32_t token) const {
    auto section = static_cast<uint32_t>(uint64_t{token} * num_sections / vocab);
    while (section_begin(section + 1) <= token) ++section;  // the quotient is rounded down
    return logits + uint64_t{section} * stride + (token - section_begin(section));
  }
};

// What sampling makes of a logit that is not finite: NaN is never drawn, infinity always.
DISTMK_FN float finite_logit(float x) {
  if (!(x >= -FLT_MAX)) return -INFINITY;     // NaN, too
  return (x > FLT_MAX ? FLT_MAX : x) + 0.0f;  // -0 becomes 0
}

// Calls f(first token, logits, their number, place) for every vector of the row. `place` is the vector's index in
// memory laid out like the row. The threads of the block divide them.
template <class Block, class F>
DISTMK_FN void for_each_vector(const Block& block, const RowLogits& row, const F& f) {
  using Vector = typename Block::Vector;
  constexpr uint32_t IN_FLIGHT = Block::LOADS_IN_FLIGHT;
  DISTMK_NO_UNROLL
  for (uint32_t section = 0; section < row.num_sections; ++section) {
    const uint32_t begin = row.section_begin(section), count = row.section_begin(section + 1) - begin;
    const uint32_t num_vectors = (count + LOGITS_PER_VECTOR - 1) / LOGITS_PER_VECTOR;
    const uint64_t first = uint64_t{section} * row.stride / LOGITS_PER_VECTOR;
    const auto* vectors = reinterpret_cast<const Vector*>(row.logits) + first;
    DISTMK_NO_UNROLL
    for (uint32_t v = block.index(); v < num_vectors; v += IN_FLIGHT * block.size()) {
      Vector loaded[IN_FLIGHT];
      DISTMK_UNROLL
      for (uint32_t i = 0; i < IN_FLIGHT; ++i)
        if (v + i * block.size() < num_vectors) loaded[i] = Block::load(vectors + v + i * block.size());
      DISTMK_UNROLL
      for (uint32_t i = 0; i < IN_FLIGHT; ++i) {
        const uint32_t index = v + i * block.size(), token = index * LOGITS_PER_VECTOR;
        if (index >= num_vectors) break;
        const float x[LOGITS_PER_VECTOR] = {loaded[i].x, loaded[i].y, loaded[i].z, loaded[i].w};
        f(begin + token, x, count - token < LOGITS_PER_VECTOR ? count - token : LOGITS_PER_VECTOR, first + index);
      }
    }
  }
}

// Calls f(token, finite logit) for every token.
template <class Block, class F>
DISTMK_FN void for_each_token(const Block& block, const RowLogits& row, const F& f) {
  for_each_vector(block, row, [&](uint32_t token, const float* x, uint32_t count, uint64_t) {
    DISTMK_UNROLL
    for (uint32_t i = 0; i < LOGITS_PER_VECTOR; ++i)
      if (i < count) f(token + i, finite_logit(x[i]));
  });
}

// The largest logit, and the smallest of its tokens.
template <class Block>
DISTMK_NOINLINE Candidate best_token(const Block& block, const RowLogits& row) {
  Candidate best = {-INFINITY, -1};
  for_each_token(block, row,
                 [&](uint32_t token, float x) { best = better_of(best, {x, static_cast<int32_t>(token)}); });
  return block.reduce(best, [](const Candidate& a, const Candidate& b) { return better_of(a, b); });
}

}  // namespace distmk
