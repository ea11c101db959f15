// Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
// A number depends on seed and position alone, so a draw is the same in any batch and on any number of ranks.
#pragma once
#include "abi.h"
#include "platform/platform.h"

namespace distmk {

struct Philox {
  uint32_t word[4];

  DISTMK_FN Philox(uint64_t key, uint32_t c0, uint32_t c1) : word{c0, c1, 0, 0} {
    auto k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
    DISTMK_NO_UNROLL
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

}  // namespace distmk
