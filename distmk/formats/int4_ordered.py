"""Int4 with columns sorted by group, as GPTQ's act-order (desc_act) stores the most active columns in the first groups.

Tasks read their activations in the same order.
"""

from __future__ import annotations

from distmk.formats.int4 import Int4


class Int4Ordered(Int4):
    """Rows are those of `Int4`."""

    id = 5
    name = "int4_ordered"
    quantizes = False
    is_ordered = True
    runs_on_gpu = False
