// Rows of 4-bit codes, sorted by group (distmk/formats/int4_g32_ordered.py).
#pragma once
#include "host/formats/int4_groups.h"

namespace distmk {

using Int4G32OrderedRows = Int4GroupRows<Int4G32OrderedFormat>;

}  // namespace distmk
