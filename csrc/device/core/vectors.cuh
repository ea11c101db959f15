// One float32 or four of them that follow each other, so that the same code goes through rows of either.
#pragma once
#include "platform/device.h"

namespace distmk {

// For four at a time.
DISTMK_FN bool is_aligned(const void* p) { return reinterpret_cast<uint64_t>(p) % sizeof(float4) == 0; }
DISTMK_FN float square(const float4& v) { return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }
DISTMK_FN float square(float v) { return v * v; }

}  // namespace distmk
