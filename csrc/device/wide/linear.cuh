// Linear layers of a wide iteration.
#pragma once
#include "device/core/shared.cuh"

namespace distmk {

DISTMK_FN void body_wide_linear(Context&, const WideLinearArgs&) {}

}  // namespace distmk
