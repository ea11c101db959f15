"""Integers of 4 bits in groups of 128 columns.

Files with larger groups repeat their scales.
"""

from __future__ import annotations

from distmk.formats.int4_groups import Int4Groups


class Int4(Int4Groups):
    """Scales and zero points are [rows, columns / 128]."""

    id = 3
    name = "int4"
    group_cols = 128
    quantizes = True
