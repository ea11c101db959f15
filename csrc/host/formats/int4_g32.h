// Rows of 4-bit codes in groups of 32 columns (distmk/formats/int4_g32.py).
#pragma once
#include "host/formats/int4_groups.h"

namespace distmk {

using Int4G32Rows = Int4GroupRows<Int4G32Format>;

}  // namespace distmk
