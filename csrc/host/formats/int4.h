// Rows of 4-bit codes in groups of 128 columns (distmk/formats/int4.py).
#pragma once
#include "host/formats/int4_groups.h"

namespace distmk {

using Int4Rows = Int4GroupRows<Int4Format>;

}  // namespace distmk
