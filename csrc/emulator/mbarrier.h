// An mbarrier of the emulator, in the 64 bits that it has on a GPU.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "emulator/watch.h"
#include "platform/planted_bug.h"

namespace distmk {
namespace emulator {

struct Mbarrier {
  uint16_t expected, pending;
  uint32_t phase : 1;
  int32_t bytes : 31;  // bytes that have not landed yet
};
static_assert(sizeof(Mbarrier) == 8, "");

inline Mbarrier mbarrier_at(const uint64_t* at) {
  const Unwatched here;
  Mbarrier b;
  memcpy(&b, at, 8);
  return b;
}
inline void mbarrier_set(uint64_t* at, const Mbarrier& b) {
  const Unwatched here;
  memcpy(at, &b, 8);
}

inline void mbarrier_update(uint64_t* at, int arrivals, int bytes) {
  Mbarrier b = mbarrier_at(at);
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
  mbarrier_set(at, b);
}
inline void mbarrier_arrive(uint64_t* at, uint32_t times, int bytes) {
  if (!missing_release) release_order(order_of(at, mbarrier_at(at).phase));
  mbarrier_update(at, static_cast<int>(times), bytes);
}
// Orders this thread's copied data before the end of the phase that waits for it.
inline void mbarrier_fill(const uint64_t* at) { release_order(order_of(at, mbarrier_at(at).phase)); }
inline void mbarrier_complete(uint64_t* at, uint32_t num_bytes) {
  mbarrier_update(at, 0, -static_cast<int>(num_bytes));
}
inline void mbarrier_init(uint64_t* at, uint32_t count) {
  mbarrier_set(at, {static_cast<uint16_t>(count), static_cast<uint16_t>(count), 0, 0});
}
// Whether the phase with this parity has completed.
inline bool mbarrier_test(const uint64_t* at, uint32_t parity) {
  if (mbarrier_at(at).phase == parity) return false;
  acquire_order(order_of(at, parity));
  return true;
}

}  // namespace emulator
}  // namespace distmk
