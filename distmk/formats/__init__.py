"""Weight formats: what the bytes of a matrix mean, and the order in which a GPU streams them."""

from __future__ import annotations

from distmk.abi import WeightFormatId
from distmk.formats.bf16 import Bf16
from distmk.formats.weight_format import WeightFormat

__all__ = ["FORMATS", "Bf16", "WeightFormat"]

FORMATS: dict[WeightFormatId, type[WeightFormat]] = {kind.id: kind for kind in (Bf16,)}
"""Every weight format."""
