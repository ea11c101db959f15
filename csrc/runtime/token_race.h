// A draw from a softmax as a race (the Gumbel-max trick). Each token gets an exponential random time, with its
// probability as the rate, and the earliest token wins. A small change of the logits then changes the winner about as
// seldom as it must.
#pragma once
#include <math.h>

#include "runtime/philox.h"
#include "runtime/row_logits.h"

namespace distmk {

// Random numbers of the tokens at a position. A number depends on seed, position and token alone.
struct TokenNumbers {
  static constexpr uint32_t PER_CALL = 4;  // tokens that share a call of Philox
  static_assert(PER_CALL == LOGITS_PER_VECTOR, "");

  uint64_t seed;
  uint32_t position;

  DISTMK_FN uint32_t of(uint32_t token) const { return item(call(token / PER_CALL).word, token % PER_CALL); }
  // Numbers of the tokens of a vector. A vector that begins inside a Philox call, as in some sections, takes two calls.
  DISTMK_FN void of(uint32_t first, uint32_t* number) const {
    const Philox low = call(first / PER_CALL);
    DISTMK_UNROLL
    for (uint32_t i = 0; i < PER_CALL; ++i) number[i] = low.word[i];
    const uint32_t shift = first % PER_CALL;
    if (!shift) return;
    const Philox high = call(first / PER_CALL + 1);
    DISTMK_UNROLL
    for (uint32_t i = 0; i < PER_CALL; ++i)
      number[i] = shift + i < PER_CALL ? item(low.word, shift + i) : item(high.word, shift + i - PER_CALL);
  }

  // An element of an array that stays in registers, because no index is computed.
  template <class T>
  DISTMK_FN static T item(const T* array, uint32_t index) {
    return index == 0 ? array[0] : index == 1 ? array[1] : index == 2 ? array[2] : array[3];
  }
  DISTMK_FN static uint32_t least_of(const uint32_t* number) {
    const uint32_t a = number[0] < number[1] ? number[0] : number[1], b = number[2] < number[3] ? number[2] : number[3];
    return a < b ? a : b;
  }

 private:
  DISTMK_FN Philox call(uint32_t index) const { return Philox(seed, index, position); }
};

// A number in (0, 1). All 32 bits count near 0, where the winners are.
DISTMK_FN float uniform(uint32_t number) { return fminf((static_cast<float>(number) + 0.5f) * 0x1p-32f, 1 - 0x1p-24f); }

// Gumbel noise: minus the logarithm of an exponential random number. A token's score is its logit over the temperature
// plus this.
DISTMK_FN float gumbel(uint32_t number) { return -logf(-log1pf(-uniform(number))); }
// Slightly above gumbel(0), the maximum. Another upper bound of gumbel(number) is -logf(uniform(number)).
constexpr float MAX_GUMBEL = 22.9f;
constexpr float LOG_ERROR = 1e-3f;  // exceeds the error of that bound if a fast logarithm computes it

}  // namespace distmk
