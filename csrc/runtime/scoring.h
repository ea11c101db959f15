// How a query scores positions, and which positions it sees: the last `window` up to its own.
#pragma once
#include "abi.h"
#include "runtime/math.h"

namespace distmk {

// Number of positions that the rows of a run see together: the last ones of its sequence.
DISTMK_FN uint32_t num_seen(uint32_t window, const BatchRun& run, uint32_t num_rows) {
  const uint32_t kv_len = static_cast<uint32_t>(run.kv_len), most = window + (num_rows - 1);
  return kv_len < most ? kv_len : most;
}
DISTMK_FN uint32_t num_seen(uint32_t window, const BatchRun& run) {
  return num_seen(window, run, static_cast<uint32_t>(run.num_rows));
}
// The first position that the row at `position` sees.
DISTMK_FN uint32_t first_seen(uint32_t window, uint32_t position) {
  return position < window ? 0 : position + 1 - window;
}

// Whether scores are only multiplied by `scale`.
DISTMK_FN bool are_only_scaled(const ScoreArgs& args) { return args.softcap == 0.0f; }

// Caps a scaled score (Scores in distmk/abi/scores.py): cap * tanh(score / cap). The score and the result are both
// multiplied by log(e) to the base of Math::exp.
template <class Math, class T>
DISTMK_FN T vary_score(T score, const ScoreArgs& args) {
  const float cap = args.softcap;
  const T power = Math::exp(-2.0f * Math::magnitude(score) * quotient(1.0f, cap));
  return Math::with_sign(cap * Math::LOG_E * (1.0f - power) * Math::inverse(1.0f + power), score);
}

}  // namespace distmk
