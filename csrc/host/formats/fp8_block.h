// Rows of FP8 codes with a scale for each 128 columns (distmk/formats/fp8_block.py).
#pragma once
#include "host/formats/e4m3.h"

namespace distmk {

using Fp8BlockRows = E4m3Rows<Fp8BlockFormat::GROUP_COLS>;

}  // namespace distmk
