// The logits of a row of the batch over the whole vocabulary: one section for each rank's shard, one after another.
#pragma once
#include <float.h>
#include <math.h>
#include <stdint.h>

#include "platform/platform.h"

namespace distmk {

constexpr uint32_t LOGITS_PER_VECTOR = 4;
// A row is divided into segments of consecutive tokens. On a GPU a segment is the work of one warp.
constexpr uint32_t VECTORS_PER_SEGMENT = TOKENS_PER_SEGMENT / LOGITS_PER_VECTOR;

struct Segment {
  uint32_t begin, count;  // tokens; at least one
  uint64_t first_vector;  // in memory laid out like the row
};

// A rank's shard of the vocabulary.
struct Section {
  uint32_t begin, count;  // tokens
  uint64_t first_vector;

  DISTMK_FN uint32_t num_segments() const { return (count + TOKENS_PER_SEGMENT - 1) / TOKENS_PER_SEGMENT; }
  DISTMK_FN Segment segment(uint32_t index) const {
    const uint32_t offset = index * TOKENS_PER_SEGMENT, left = count - offset;
    return {begin + offset, left < TOKENS_PER_SEGMENT ? left : TOKENS_PER_SEGMENT,
            first_vector + offset / LOGITS_PER_VECTOR};
  }
};

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

  // Segments are in the order of tokens; each is in one section.
  DISTMK_FN Section section(uint32_t index) const {
    const uint32_t begin = section_begin(index);
    return {begin, section_begin(index + 1) - begin, uint64_t{index} * stride / LOGITS_PER_VECTOR};
  }
};

// Makes a logit finite: NaN is never drawn, infinity always. -0 becomes 0.
DISTMK_FN float finite_logit(float x) { return fminf(fmaxf(x, -INFINITY), FLT_MAX) + 0.0f; }

// Calls f(first token, logits, count, place) for every vector of a segment. `place` is the vector's index in memory
// laid out like the row. The logits are made finite, and those past `count` are -infinity. The lanes of a warp share
// the vectors; each lane sees tokens in ascending order, and some vectors without tokens.
template <class Block, uint32_t IN_FLIGHT = Block::LOADS_IN_FLIGHT, class F>
DISTMK_FN void for_each_vector_in(const RowLogits& row, const Segment& segment, const F& f) {
  using Vector = typename Block::Vector;
  constexpr uint32_t STEP = IN_FLIGHT * Block::LANES;
  const auto* vectors = reinterpret_cast<const Vector*>(row.logits) + segment.first_vector;
  const uint32_t last = (segment.count - 1) / LOGITS_PER_VECTOR;
  DISTMK_NO_UNROLL
  for (uint32_t begin = 0; begin <= last; begin += STEP) {
    const uint32_t v = begin + Block::lane();
    Vector loaded[IN_FLIGHT];
    DISTMK_UNROLL
    for (uint32_t i = 0; i < IN_FLIGHT; ++i) {
      const uint32_t index = v + i * Block::LANES;
      loaded[i] = Block::load(vectors + (index < last ? index : last));
    }
    DISTMK_UNROLL
    for (uint32_t i = 0; i < IN_FLIGHT; ++i) {
      const uint32_t index = v + i * Block::LANES, token = index * LOGITS_PER_VECTOR;
      const uint32_t count = token < segment.count ? segment.count - token : 0;
      const float x[LOGITS_PER_VECTOR] = {
          count > 0 ? finite_logit(loaded[i].x) : -INFINITY, count > 1 ? finite_logit(loaded[i].y) : -INFINITY,
          count > 2 ? finite_logit(loaded[i].z) : -INFINITY, count > 3 ? finite_logit(loaded[i].w) : -INFINITY};
      f(segment.begin + token, x, count < LOGITS_PER_VECTOR ? count : LOGITS_PER_VECTOR, segment.first_vector + index);
    }
  }
}

// Calls f(index, segment) for every segment of the row. The warps of the block share the segments.
template <class Block, class F>
DISTMK_FN void for_each_segment(const RowLogits& row, const F& f) {
  uint32_t index = Block::warp(), first = 0;
  DISTMK_NO_UNROLL
  for (uint32_t i = 0; i < row.num_sections; ++i) {
    const Section section = row.section(i);  // divides, which would slow the inner loop down
    const uint32_t end = first + section.num_segments();
    DISTMK_NO_UNROLL
    for (; index < end; index += Block::NUM_WARPS) f(index, section.segment(index - first));
    first = end;
  }
}

DISTMK_FN float highest_of(const float* x) { return fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])); }

// for_each_vector_in() over all segments of the row.
template <class Block, uint32_t IN_FLIGHT = Block::LOADS_IN_FLIGHT, class F>
DISTMK_FN void for_each_vector(const RowLogits& row, const F& f) {
  for_each_segment<Block>(
      row, [&](uint32_t, const Segment& segment) { for_each_vector_in<Block, IN_FLIGHT>(row, segment, f); });
}

}  // namespace distmk
