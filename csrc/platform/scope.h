// The scope of an acquire or a release, for platform/platform.h and its users.
#pragma once
#include <cstdint>

namespace distmk {

// Which threads an acquire or release synchronizes: one block, one GPU, or all GPUs and the host. The host twin treats
// all scopes alike.
enum class Scope : uint32_t { BLOCK, DEVICE, SYSTEM };

}  // namespace distmk
