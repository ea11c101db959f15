#pragma once
#include <cstdint>

namespace distmk {

// Who takes part in a signal: a worker's own threads, its GPU, or every GPU. On the host all is one.
enum class Scope : uint32_t { BLOCK, DEVICE, SYSTEM };

}  // namespace distmk
