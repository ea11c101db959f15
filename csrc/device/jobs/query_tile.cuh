// A warp's tile of 16 queries, for block jobs and row jobs of attention: the online softmax of their scores, and their
// output so far.
#pragma once
#include "device/attention/lse.cuh"
#include "device/core/bf16.cuh"
#include "runtime/scoring.h"

namespace distmk {
namespace jobs {

constexpr uint32_t QUERIES_PER_WARP = 16;

// Takes the scores of KEYS positions at once, and has COLS columns of the output. Lane 4 g + t has queries g and g + 8.
// Its columns, among every eight, are the ones that `multiply` gives to t.
template <uint32_t COLS, uint32_t KEYS>
struct QueryTile {
  static constexpr uint32_t SCORES = KEYS / 2;  // per lane: c registers of one group of eight positions after another
  uint32_t p[KEYS / 16][4];
  float acc[COLS / 8][4];
  LogSumExp<Base2> softmax[2];  // the sum covers only this lane's positions until reduce_sums()

  DISTMK_FN static uint32_t lane() { return threadIdx.x % 32; }

  DISTMK_FN void clear() {
#pragma unroll
    for (uint32_t i = 0; i < COLS / 8; ++i) acc[i][0] = acc[i][1] = acc[i][2] = acc[i][3] = 0.0f;
    softmax[0] = softmax[1] = {};
  }

  // Multiplies the scores by `scale`, which includes log2(e), and applies the score variant.
  DISTMK_FN static void vary(float (&s)[SCORES], float scale, ScoreArgs args) {
#pragma unroll
    for (uint32_t i = 0; i < SCORES; ++i) s[i] = vary_score<Base2>(s[i] * scale, args);
  }
  // Position of a lane's score i, for scores that begin at position `first`.
  DISTMK_FN static uint32_t position(uint32_t first, uint32_t i) { return first + lane() % 4 * 2 + i / 4 * 8 + i % 2; }
  // A query sees the `window` positions before its end[i]. mask_from() hides the positions behind them, mask_before()
  // the positions in front of them. `first`: position of the first score.
  DISTMK_FN static void mask_from(uint32_t first, const uint32_t (&end)[2], float (&s)[SCORES]) {
#pragma unroll
    for (uint32_t i = 0; i < SCORES; ++i)
      if (position(first, i) >= end[i % 4 / 2]) s[i] = -INFINITY;
  }
  DISTMK_FN static void mask_before(uint32_t first, const uint32_t (&end)[2], uint32_t window, float (&s)[SCORES]) {
#pragma unroll
    for (uint32_t i = 0; i < SCORES; ++i)
      if (position(first, i) + window < end[i % 4 / 2]) s[i] = -INFINITY;
  }
  // Online softmax step: turns scores into weights. The caller must then rescale the accumulator by `factor`. `scale`:
  // the scale of scores times log2(e).
  DISTMK_FN void weigh(float (&s)[SCORES], float scale, float (&factor)[2]) {
    float minus_max[2];
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      float most = -INFINITY;
#pragma unroll
      for (uint32_t j = 2 * i; j < SCORES; j += 4) most = fmaxf(most, fmaxf(s[j], s[j + 1]));
      factor[i] = softmax[i].raise(attention::lanes_max<4>(most) * scale);
      minus_max[i] = -finite_max(softmax[i].max);
    }
#pragma unroll
    for (uint32_t i = 0; i < SCORES; ++i) {
      s[i] = Base2::exp(fmaf(s[i], scale, minus_max[i % 4 / 2]));
      softmax[i % 4 / 2].sum += s[i];
    }
  }
  // Keeps the weights as A fragments.
  DISTMK_FN void keep_weights(const float (&s)[SCORES]) {
#pragma unroll
    for (uint32_t k = 0; k < KEYS / 16; ++k)
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) p[k][i] = pack_bf16(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
  }
  DISTMK_FN void rescale(const float (&factor)[2]) {
    if (__all_sync(~0u, factor[0] == 1.0f && factor[1] == 1.0f)) return;  // no maximum has changed
#pragma unroll
    for (uint32_t i = 0; i < COLS / 8; ++i) {
      acc[i][0] *= factor[0];
      acc[i][1] *= factor[0];
      acc[i][2] *= factor[1];
      acc[i][3] *= factor[1];
    }
  }

  DISTMK_FN void reduce_sums() {
    for (LogSumExp<Base2>& each : softmax) each.sum = attention::lanes_sum<4>(each.sum);
  }
};

}  // namespace jobs
}  // namespace distmk
