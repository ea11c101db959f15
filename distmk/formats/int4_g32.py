"""Integers of 4 bits in groups of 32 columns, and of files whose groups have another multiple of 32.

Files with larger groups repeat their scales.
"""

from __future__ import annotations

from distmk.formats.int4_groups import Int4Groups


class Int4G32(Int4Groups):
    """Scales and zero points are [rows, columns / 32]."""

    id = 4
    name = "int4_g32"
    group_cols = 32
    quantizes = False
