"""Weight formats: what the bytes of a matrix mean, and the order in which a GPU streams them.

Importing this package imports all of its modules, so a new file adds its format by being here. The header of the same
name in csrc/host/formats decodes the format on the host.
"""

from __future__ import annotations

import importlib
import pkgutil

from distmk.formats.bf16 import Bf16
from distmk.formats.weight_format import WeightFormat

__all__ = ["FORMATS", "Bf16", "WeightFormat"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

FORMATS = {found.id: found for found in sorted(WeightFormat.__subclasses__(), key=lambda found: found.id)}
"""Every weight format, by its number."""
if len({found.name for found in FORMATS.values()}) < len(WeightFormat.__subclasses__()):
    raise TypeError("two weight formats have the same id or name")
