// The few primitives in which the host twin and the GPU differ. Everything else under csrc/runtime is written once.
#pragma once
#include "platform/scope.h"

// Whether this is the kernel's code: for a GPU, or for a CPU that plays one (csrc/emulator).
#if defined(__CUDACC__) || defined(DISTMK_EMULATED)
#define DISTMK_GPU
#endif

namespace distmk {
// Whether what runs here shares its cores with others: a process may be stopped, a kernel is not.
#ifdef __CUDACC__
constexpr bool MAY_BE_STOPPED = false;
#else
constexpr bool MAY_BE_STOPPED = true;
#endif
// Whether a trigger takes as long as a small task, as the fence before it does on a GPU.
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
