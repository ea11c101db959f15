// Keys that order a row's tokens: by logit, and by id where logits are equal.
#pragma once
#include <stdint.h>
#include <string.h>

#include "platform/platform.h"

namespace distmk {

// 64 bits that are smaller for better tokens: the bits of the logit in descending order, then the id.
using TokenKey = uint64_t;
DISTMK_FN TokenKey token_key(float x, uint32_t token) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  const uint32_t ascending = bits >> 31 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(~ascending) << 32 | token;
}
DISTMK_FN uint32_t token_of(TokenKey key) { return static_cast<uint32_t>(key); }
DISTMK_FN float logit_of(TokenKey key) {
  const auto ascending = ~static_cast<uint32_t>(key >> 32);
  const uint32_t bits = ascending >> 31 ? ascending & 0x7fffffffu : ~ascending;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

}  // namespace distmk
