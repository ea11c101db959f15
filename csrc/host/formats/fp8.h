// Rows of FP8 codes with one scale (distmk/formats/fp8.py).
#pragma once
#include "host/formats/e4m3.h"

namespace distmk {

using Fp8Rows = E4m3Rows<0>;

}  // namespace distmk
