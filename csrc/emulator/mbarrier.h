// An mbarrier's 64 bits.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace distmk {
namespace emulator {

struct Mbarrier {
  uint16_t expected, pending;
  uint32_t phase : 1;
  int32_t bytes : 31;  // still to land
};
static_assert(sizeof(Mbarrier) == 8, "");

inline void mbarrier_update(uint64_t* at, int arrivals, int bytes) {
  Mbarrier b;
  memcpy(&b, at, 8);
  if (arrivals > b.pending) {
    fprintf(stderr, "emulator: %d arrivals at a barrier that waits for %u\n", arrivals, b.pending);
    abort();
  }
  b.pending = static_cast<uint16_t>(b.pending - arrivals);
  b.bytes = b.bytes + bytes;
  if (!b.pending && !b.bytes) {
    b.phase ^= 1;
    b.pending = b.expected;
  }
  memcpy(at, &b, 8);
}
inline void mbarrier_complete(uint64_t* at, uint32_t num_bytes) {
  mbarrier_update(at, 0, -static_cast<int>(num_bytes));
}
inline void mbarrier_init(uint64_t* at, uint32_t count) {
  const Mbarrier b{static_cast<uint16_t>(count), static_cast<uint16_t>(count), 0, 0};
  memcpy(at, &b, 8);
}
// Whether the phase of this parity is over.
inline bool mbarrier_test(const uint64_t* at, uint32_t parity) {
  Mbarrier b;
  memcpy(&b, at, 8);
  return b.phase != parity;
}

}  // namespace emulator
}  // namespace distmk
