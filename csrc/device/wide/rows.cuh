// Row by row in a wide iteration.
#pragma once
#include "device/core/shared.cuh"

namespace distmk {

DISTMK_FN void body_wide_embed(Context&, const WideEmbedArgs&) {}
DISTMK_FN void body_wide_sum(Context&, const WideSumArgs&) {}
DISTMK_FN void body_select_rows(Context&, const SelectRowsArgs&) {}
DISTMK_FN void body_argmax_rows(Context&, const ArgmaxRowsArgs&) {}

}  // namespace distmk
