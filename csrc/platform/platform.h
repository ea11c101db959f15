// Selects the primitives in which the host twin and the GPU differ. Everything under csrc/runtime is written once on
// top of them.
#pragma once
#include "platform/scope.h"

// Defined where the kernel's code is compiled: for a GPU, or for the emulator (csrc/emulator).
#if defined(__CUDACC__) || defined(DISTMK_EMULATED)
#define DISTMK_GPU
#endif

namespace distmk {
// Whether a waiting thread can be descheduled or stopped. Threads of a resident kernel cannot.
#ifdef __CUDACC__
constexpr bool MAY_BE_STOPPED = false;
#else
constexpr bool MAY_BE_STOPPED = true;
#endif
// Whether a signal takes as long as a small task. On a GPU it does, because of the fence before it.
#ifdef DISTMK_GPU
constexpr bool SIGNALS_TAKE_LONG = true;
#else
constexpr bool SIGNALS_TAKE_LONG = false;
#endif
// Whether this is the kernel of programs with packed weights.
#ifdef DISTMK_PACKED
constexpr bool HAS_PACKED_WEIGHTS = true;
#else
constexpr bool HAS_PACKED_WEIGHTS = false;
#endif
}  // namespace distmk

#ifdef DISTMK_GPU
#include "platform/device.h"
#else
#include "platform/host.h"
#endif

namespace distmk {
// Index of the lowest bit that is set. `bits` must not be 0.
DISTMK_FN uint32_t lowest_bit(uint32_t bits) { return floor_log2(bits & (0 - bits)); }
// Place of this thread among the threads of its team that have voted (Team::votes), in the order of their indices.
DISTMK_FN uint32_t place_among(uint32_t votes, const Team& team) {
  return count_bits(votes & ((1u << team.index) - 1));
}
}  // namespace distmk
