"""Drafters: what proposes the tokens that an iteration verifies (speculative decoding).

Importing this package imports all of its modules, so a new file adds its method by being here.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from distmk.absent_parameters import suggestion
from distmk.drafters.drafter import DRAFTERS, Drafter, DraftPlace
from distmk.errors import UsageError, shown

__all__ = ["DRAFTERS", "DraftPlace", "Drafter", "read_speculative_config"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

NAME = "speculative_config"


def read_speculative_config(config: object) -> Drafter | None:
    """The drafter that vLLM's `speculative_config` asks for; None: no drafts, as for None and {}.

    UsageError: there is no such method, a parameter of the method is unknown or out of range, or one is missing.
    """
    if config is None or config == {}:
        return None
    if not isinstance(config, Mapping):
        raise UsageError(f'{NAME} is {shown(config)}; expected a mapping such as {{"method": "ngram"}}')
    given: dict[Any, Any] = dict(config)
    methods = ", ".join(name for name, found in DRAFTERS.items() if found.is_for_users)
    if (method := given.pop("method", None)) is None:
        what = "names a draft model" if "model" in given else "has no method"
        raise UsageError(f"{NAME} {what}; expected one of the methods {methods}, which need no model")
    if method not in DRAFTERS:
        raise UsageError(f"the method of {NAME} is {shown(method)}; methods are {methods}")
    drafter = DRAFTERS[method]
    for name in given:
        if name not in drafter.parameters():
            close = suggestion(str(name), drafter.parameters())
            raise UsageError(f"{NAME} has {shown(name)}, which {method} does not have{close}")
    return drafter.read(given)
