// Random numbers by counter: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), and
// the noise of the Gumbel-max trick. A number depends on seed, position and token alone, so that a draw is the same in
// any batch, on any number of ranks and in any order of the tokens.
#pragma once
#include <math.h>

#include "abi.h"
#include "platform/platform.h"

namespace distmk {

struct Philox {
  uint32_t word[4];

  DISTMK_FN Philox(uint64_t key, uint32_t c0, uint32_t c1) : word{c0, c1, 0, 0} {
    auto k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
#ifdef __CUDACC__
#pragma unroll
#endif
    for (uint32_t round = 0; round < 10; ++round) {
      const uint64_t p0 = uint64_t{0xD2511F53u} * word[0], p1 = uint64_t{0xCD9E8D57u} * word[2];
      word[0] = static_cast<uint32_t>(p1 >> 32) ^ word[1] ^ k0;
      word[1] = static_cast<uint32_t>(p1);
      word[2] = static_cast<uint32_t>(p0 >> 32) ^ word[3] ^ k1;
      word[3] = static_cast<uint32_t>(p0);
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
  }
};

constexpr uint32_t TOKENS_PER_PHILOX = 4;
// The four numbers of tokens 4 * group, 4 * group + 1, ...
DISTMK_FN Philox token_numbers(uint64_t seed, uint32_t position, uint32_t group) { return {seed, group, position}; }

// Uniform in (0, 1), up to the rounding of a float.
DISTMK_FN float unit_interval(uint32_t x) { return (static_cast<float>(x) + 0.5f) * 0x1p-32f; }
// argmax over tokens of z + gumbel_noise(unit_interval(x)) has the probabilities softmax(z): -log(v') of a uniform v'
// is exponential, and the noise is minus the logarithm of that. It is at most MAX_GUMBEL_NOISE.
DISTMK_FN float gumbel_noise(float v) { return -logf(-log1pf(-v)); }
constexpr float MAX_GUMBEL_NOISE = 23.0f;  // -log(2^-33) = 22.9

}  // namespace distmk
