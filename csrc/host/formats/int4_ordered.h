// Rows of 4-bit codes, sorted by group (distmk/formats/int4_ordered.py).
#pragma once
#include "host/formats/int4_groups.h"

namespace distmk {

using Int4OrderedRows = Int4GroupRows<Int4OrderedFormat>;

}  // namespace distmk
