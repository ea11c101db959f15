"""Int4G32 with columns sorted by group, as GPTQ's act-order (desc_act) stores the most active columns in the first groups.

Tasks read their activations in the same order.
"""

from __future__ import annotations

from distmk.formats.int4_g32 import Int4G32


class Int4G32Ordered(Int4G32):
    """Rows are those of `Int4G32`."""

    id = 6
    name = "int4_g32_ordered"
    quantizes = False
    is_ordered = True
