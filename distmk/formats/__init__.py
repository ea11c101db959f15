"""Weight formats: what the bytes of a matrix mean, and the order in which a GPU streams them.

Importing this package imports all of its modules, so a new file adds its format by being here. The header of the same
name in csrc/host/formats decodes the format on the host.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

from distmk.errors import UsageError, shown
from distmk.formats.bf16 import Bf16
from distmk.formats.weight_format import QuantizedRows, WeightFormat

__all__ = ["FORMATS", "Bf16", "QuantizedRows", "WeightFormat", "find_format"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def _concrete(base: type[Any]) -> Iterator[type[WeightFormat]]:
    """The classes below `base` that have a number; classes between share code."""
    for found in base.__subclasses__():
        if "id" in vars(found):
            yield found
        yield from _concrete(found)


FORMATS = {found.id: found for found in sorted(_concrete(WeightFormat), key=lambda found: found.id)}
"""Every weight format, by its number."""
if len({found.name for found in FORMATS.values()}) < len(list(_concrete(WeightFormat))):
    raise TypeError("two weight formats have the same id or name")


def find_format(name: object, what: str = "the weight format") -> type[WeightFormat]:
    """The format `name`. UsageError, naming `what`: there is none."""
    for found in FORMATS.values():
        if found.name == name:
            return found
    known = ", ".join(found.name for found in FORMATS.values())
    raise UsageError(f"{what} is {shown(name)}; formats are {known}")
