// Softmax over positions that are visited in pieces: the scalars of log-sum-exp partials (FlashAttention,
// arXiv:2205.14135; online softmax: Milakov and Gimelshein, arXiv:1805.02867).
//
// A partial of a set of positions i with scores s_i and values v_i is
//   m = max_i s_i,    l = sum_i exp(s_i - m),    o = sum_i exp(s_i - m) v_i              (maximum, sum, accumulator),
// and the partials j of disjoint sets combine to
//   m = max_j m_j,    w_j = exp(m_j - m),    l = sum_j w_j l_j,    o = sum_j w_j o_j.    Attention's output is o / l.
// A normalized partial, log-sum-exp m_j + log l_j and elements o_j / l_j, combines the same way with a sum of 1.
//
// Every kernel and host body that splits a softmax takes m, l and w_j from here. Accumulators stay with the callers, in
// tensor-core fragments, shared memory or SIMD vectors. Partials are merged one after another (begin_merge), or by the
// lanes of a warp, one partial a lane (device/attention/lse.cuh).
#pragma once
#include "runtime/math.h"

namespace distmk {

// The value that is subtracted from scores and maxima: m, or 0 if no position was seen (m = -inf), because -inf - -inf
// is NaN.
DISTMK_FN float finite_max(float m) { return m > -INFINITY ? m : 0.0f; }

// w_j of a partial with maximum `m_j`. The maximum `m` of all partials must be finite (see finite_max).
DISTMK_FN float combine_weight(float m_j, float m) { return BaseE::exp(m_j - m); }

// 1 / l, which turns an accumulator into attention's output.
DISTMK_FN float normalizer(float sum) { return quotient(1.0f, sum); }

// m and l of a set of positions, with exponentials to base `Base`.
template <class Base>
struct LogSumExp {
  float max = -INFINITY, sum = 0.0f;

  // Call it before adding scores of up to `m`. It rescales the sum and returns exp(old max - new max), by which the
  // caller rescales its accumulator.
  DISTMK_FN float raise(float m) {
    const float before = max;
    max = fmaxf(before, m);
    const float factor = Base::exp(before - finite_max(max));
    sum *= factor;
    return factor;
  }
  // Adds the sum of a partial whose maximum is at most `max`, which must be finite. Returns the partial's w_j, by which
  // the caller weights the partial's accumulator.
  DISTMK_FN float add(const LogSumExp& partial) {
    const float weight = Base::exp(partial.max - max);
    sum += weight * partial.sum;
    return weight;
  }
  // Softmax weight of a score that is at most `max`, before normalization.
  DISTMK_FN float weight(float score) const { return Base::exp(score - finite_max(max)); }
  // m + log l, to base e.
  DISTMK_FN float log() const {
#ifdef DISTMK_GPU
    return max + __logf(sum);
#else
    return max + std::log(sum);
#endif
  }
};

// Begins the merge of `count` partials: takes their maximum, which must be finite, and leaves the sum at 0. The caller
// then calls add() for each. partial(j) returns the LogSumExp of partial j.
template <class Base, class Partial>
DISTMK_FN LogSumExp<Base> begin_merge(uint32_t count, const Partial& partial) {
  LogSumExp<Base> total;
  DISTMK_UNROLL
  for (uint32_t j = 0; j < count; ++j) total.max = fmaxf(total.max, partial(j).max);
  return total;
}

}  // namespace distmk
