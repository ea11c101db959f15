#pragma once
#include <cstdint>

// Whether this is the kernel's code: for a GPU, or for a CPU that plays one (csrc/emulator).
#if defined(__CUDACC__) || defined(DISTMK_EMULATED)
#define DISTMK_GPU
#endif

namespace distmk {

// Who takes part in a signal: a worker's own threads, its GPU, or every GPU. On the host all is one.
enum class Scope : uint32_t { BLOCK, DEVICE, SYSTEM };

}  // namespace distmk
