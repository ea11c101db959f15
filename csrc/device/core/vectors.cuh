// Helpers that let the same code go through rows of float32 one element or four (float4) at a time.
#pragma once
#include "platform/device.h"

namespace distmk {

// Whether `p` allows float4 accesses.
DISTMK_FN bool is_aligned(const void* p) { return reinterpret_cast<uint64_t>(p) % sizeof(float4) == 0; }
DISTMK_FN float square(const float4& v) { return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }
DISTMK_FN float square(float v) { return v * v; }

}  // namespace distmk
