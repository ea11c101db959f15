// The primitives in which the host twin and the GPU differ. All else under csrc/runtime is written once.
#pragma once
#include "platform/scope.h"

// Defined in code of the kernel: compiled for a GPU, or for the emulator (csrc/emulator).
#if defined(__CUDACC__) || defined(DISTMK_EMULATED)
#define DISTMK_GPU
#endif

namespace distmk {
// Whether threads can be descheduled or stopped while they wait. Those of a resident kernel cannot.
#ifdef __CUDACC__
constexpr bool MAY_BE_STOPPED = false;
#else
constexpr bool MAY_BE_STOPPED = true;
#endif
// Whether a signal takes as long as a small task, as the fence before it does on a GPU.
#ifdef DISTMK_GPU
constexpr bool SIGNALS_TAKE_LONG = true;
#else
constexpr bool SIGNALS_TAKE_LONG = false;
#endif
}  // namespace distmk

#ifdef DISTMK_GPU
#include "platform/device.h"
#else
#include "platform/host.h"
#endif
