// The scope of a memory operation.
#pragma once
#include <cstdint>

namespace distmk {

// The threads that an acquire or release synchronizes: of one block, of one GPU, or of all GPUs and the host. The host
// twin makes no difference.
enum class Scope : uint32_t { BLOCK, DEVICE, SYSTEM };

}  // namespace distmk
