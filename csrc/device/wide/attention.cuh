// Attention of a wide iteration.
#pragma once
#include "device/core/shared.cuh"

namespace distmk {

DISTMK_FN void body_wide_append(Context&, const WideAppendArgs&) {}
DISTMK_FN void body_wide_attention(Context&, const WideAttentionArgs&) {}

}  // namespace distmk
